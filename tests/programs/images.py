"""Programs that learn from images, or draw them."""

from __future__ import annotations

from collections.abc import Sequence

from tests.programs.program import CLIPPED, PASSES, Program, after, before, replace

_EXAMPLES = "pytorch/examples"
_EXAMPLES_COMMIT = "77f55b912142e11fcfdf5b530231fb9c52f181e8"
_SHARD = "train_loader = foreprop.shard(train_loader)"
_DEAL = "train_loader = baseline.deal(train_loader)"
_PARALLELIZE = "session = foreprop.parallelize(model, optimizer)"
_WRAP = "model = baseline.wrap(model)"

MNIST = Program(
    name="examples/mnist",
    repository=_EXAMPLES,
    commit=_EXAMPLES_COMMIT,
    licence="BSD-3-Clause",
    path="mnist/main.py",
    about="Adadelta, StepLR, dropout, evaluation each epoch",
    arguments=["--epochs", "2", "--batch-size", "8", "--log-interval", "4"],
    packages=["torchvision", "PIL"],
    stand_ins=["torchvision"],
    common=[
        after("        optimizer.step()", "recorder.step(loss)"),
        after("model = Net()", "recorder.model(model)"),
    ],
    foreprop=[
        after("optimizer = optim.Adadelta(", _PARALLELIZE),
        after("train_loader = torch.utils", _SHARD),
    ],
    ddp=[after("model = Net()", _WRAP), after("train_loader = torch.utils", _DEAL)],
)

MNIST_RNN = Program(
    name="examples/mnist_rnn",
    repository=_EXAMPLES,
    commit=_EXAMPLES_COMMIT,
    licence="BSD-3-Clause",
    path="mnist_rnn/main.py",
    about="LSTM, Adadelta",
    arguments=["--epochs", "2", "--batch-size", "8", "--log-interval", "4"],
    packages=["torchvision", "PIL"],
    stand_ins=["torchvision"],
    common=[
        after("        optimizer.step()", "recorder.step(loss)"),
        after("model = Net()", "recorder.model(model)"),
    ],
    foreprop=[
        after("optimizer = optim.Adadelta(", _PARALLELIZE),
        before("model = Net()", _SHARD),
    ],
    ddp=[after("model = Net()", _WRAP), before("model = Net()", _DEAL)],
)

VAE = Program(
    name="examples/vae",
    repository=_EXAMPLES,
    commit=_EXAMPLES_COMMIT,
    licence="BSD-3-Clause",
    path="vae/main.py",
    about="Adam, a loss that is a sum, a method of the model in no_grad",
    arguments=["--epochs", "2", "--batch-size", "16"],
    packages=["torchvision", "PIL"],
    stand_ins=["torchvision"],
    common=[
        after("        optimizer.step()", "recorder.step(loss)"),
        after("model = VAE()", "recorder.model(model)"),
        replace("    test(epoch)", "    os.makedirs('results', exist_ok=True); test(epoch)"),
        before("import argparse", "import os"),
    ],
    foreprop=[
        after("optimizer = optim.Adam(", _PARALLELIZE),
        before("class VAE", _SHARD),
    ],
    ddp=[after("model = VAE()", _WRAP), before("class VAE", _DEAL)],
)

DCGAN = Program(
    name="examples/dcgan",
    repository=_EXAMPLES,
    commit=_EXAMPLES_COMMIT,
    licence="BSD-3-Clause",
    path="dcgan/main.py",
    about="two models, two optimizers, two backward passes in a step; BatchNorm",
    rounding=PASSES,
    arguments="--dataset fake --workers 0 --batchSize 4 --imageSize 64 --ngf 8 --ndf 8"
    " --niter 2 --manualSeed 3".split(),
    packages=["torchvision", "PIL"],
    stand_ins=["torchvision"],
    common=[
        replace("FakeData(image_size", "FakeData(48, image_size"),
        after("        optimizerG.step()", "recorder.step(errG + errD)"),
        after("optimizerG = optim", "recorder.model(netD); recorder.model(netG)"),
    ],
    foreprop=[
        after(
            "optimizerG = optim",
            "sessionD = foreprop.parallelize(netD, optimizerD)",
            "sessionG = foreprop.parallelize(netG, optimizerG)",
        ),
        before("ngpu = int", "dataloader = foreprop.shard(dataloader)"),
    ],
    ddp=[
        before(
            "optimizerD = optim",
            "netD, netG = baseline.wrap(netD, broadcast_buffers=False),"
            " baseline.wrap(netG, broadcast_buffers=False)",
        ),
        before("ngpu = int", "dataloader = baseline.deal(dataloader)"),
    ],
)

SUPER_RESOLUTION = Program(
    name="examples/super_resolution",
    repository=_EXAMPLES,
    commit=_EXAMPLES_COMMIT,
    licence="BSD-3-Clause",
    path="super_resolution/main.py",
    about="Adam, torch.save(model) each epoch",
    paths=["super_resolution"],
    arguments="--upscale_factor 4 --batchSize 2 --nEpochs 2 --threads 0".split(),
    packages=["torchvision", "PIL"],
    stand_ins=["torchvision"],
    common=[
        replace(
            "train_set = get_training_set(opt.upscale_factor)",
            "train_set = torch.utils.data.TensorDataset("
            "torch.rand(24, 1, 16, 16), torch.rand(24, 1, 64, 64))",
        ),
        replace("test_set = get_test_set(opt.upscale_factor)", "test_set = train_set"),
        replace("from data import", "# from data import"),
        after("        optimizer.step()", "recorder.step(loss)"),
        after("model = Net(", "recorder.model(model)"),
    ],
    foreprop=[
        after("optimizer = optim.Adam(", _PARALLELIZE),
        after(
            "training_data_loader = Data",
            "training_data_loader = foreprop.shard(training_data_loader)",
        ),
    ],
    ddp=[
        after("model = Net(", _WRAP),
        after(
            "training_data_loader = Data",
            "training_data_loader = baseline.deal(training_data_loader)",
        ),
    ],
)

SIAMESE = Program(
    name="examples/siamese_network",
    repository=_EXAMPLES,
    commit=_EXAMPLES_COMMIT,
    licence="BSD-3-Clause",
    path="siamese_network/main.py",
    about="one network twice in a forward pass, resnet18's BatchNorm, Adadelta",
    arguments=["--epochs", "1", "--batch-size", "8", "--test-batch-size", "16"],
    packages=["torchvision", "PIL"],
    stand_ins=["torchvision"],
    common=[
        after("    torch.manual_seed(args.seed)", "random.seed(args.seed)"),
        after("        optimizer.step()", "recorder.step(loss)"),
        after("model = SiameseNetwork()", "recorder.model(model)"),
    ],
    foreprop=[
        after("optimizer = optim.Adadelta(", _PARALLELIZE),
        after("train_loader = torch.utils", _SHARD),
    ],
    ddp=[
        after("model = SiameseNetwork()", "model = baseline.wrap(model, broadcast_buffers=False)"),
        after("train_loader = torch.utils", _DEAL),
    ],
)

IMAGENET = Program(
    name="examples/imagenet",
    repository=_EXAMPLES,
    commit=_EXAMPLES_COMMIT,
    licence="BSD-3-Clause",
    path="imagenet/main.py",
    about="resnet18, SGD with momentum, checkpoints with the optimizer's state; its own sampler",
    arguments="--dummy -a resnet18 --epochs 1 -b 4 -j 0 --seed 1 --dist-url env://"
    " --dist-backend gloo --no-accel".split(),
    packages=["torchvision", "PIL"],
    stand_ins=["torchvision"],
    group=True,
    common=[
        replace("FakeData(1281167, (3, 224, 224), 1000", "FakeData(48, (3, 64, 64), 1000"),
        replace("FakeData(50000, (3, 224, 224), 1000", "FakeData(12, (3, 64, 64), 1000"),
        after("        optimizer.step()", "recorder.step(loss)"),
        before("criterion = nn.CrossEntropyLoss()", "recorder.model(model)"),
    ],
    foreprop=[before('"""Sets the learning rate', _PARALLELIZE)],
    ddp=[before("criterion = nn.CrossEntropyLoss()", _WRAP)],
)

CIFAR = Program(
    name="pytorch-cifar",
    repository="kuangliu/pytorch-cifar",
    commit="49b7aa97b0c12fe0d4054e670403a16b6b834ddd",
    licence="MIT",
    path="main.py",
    about="SGD with momentum, CosineAnnealingLR, BatchNorm",
    paths=["main.py", "models", "utils.py"],
    packages=["torchvision", "PIL"],
    stand_ins=["torchvision"],
    common=[
        replace("start_epoch+200", "start_epoch+2"),
        replace("net = SimpleDLA()", "net = LeNet()"),
        replace("num_workers=2", "num_workers=0", count=2),
        replace("batch_size=128", "batch_size=8"),
        replace("from utils import progress_bar", "progress_bar = lambda *arguments: None"),
        after("        optimizer.step()", "recorder.step(loss)"),
        after("criterion = nn.Cross", "recorder.model(net)"),
    ],
    foreprop=[
        after("scheduler = torch.optim", "session = foreprop.parallelize(net, optimizer)"),
        before("testset = torchvision", "trainloader = foreprop.shard(trainloader)"),
    ],
    ddp=[
        after("criterion = nn.Cross", "net = baseline.wrap(net)"),
        before("testset = torchvision", "trainloader = baseline.deal(trainloader)"),
    ],
)

SAM = Program(
    name="sam",
    repository="davda54/sam",
    commit="3c3afdbd71cff2462ec91c734b3d1170bd0f3707",
    licence="MIT",
    path="example/train.py",
    about="SAM: two backward passes, the first of which moves the parameters by hand",
    paths=["example", "sam.py"],
    arguments="--batch_size 8 --depth 10 --epochs 1 --threads 0 --width_factor 1".split(),
    packages=["torchvision", "PIL"],
    stand_ins=["torchvision"],
    common=[
        after("optimizer.second_step(zero_grad=True)", "recorder.step(loss.mean())"),
        after("model = WideResNet(", "recorder.model(model)"),
    ],
    foreprop=[
        after("optimizer = SAM(", _PARALLELIZE),
        after("dataset = Cifar(", "dataset.train = foreprop.shard(dataset.train)"),
    ],
    ddp=[
        after("model = WideResNet(", "model = baseline.wrap(model, broadcast_buffers=False)"),
        after("dataset = Cifar(", "dataset.train = baseline.deal(dataset.train)"),
    ],
)

SCHEDULE_FREE = Program(
    name="schedule_free",
    repository="facebookresearch/schedule_free",
    commit="70785b53e778d0e872c0bbb75ff4ee54ee10c291",
    licence="Apache-2.0",
    path="examples/mnist/main.py",
    about="AdamWScheduleFree: optimizer.train() and eval() move the parameters",
    arguments=["--epochs", "2", "--batch-size", "8"],
    packages=["torchvision", "PIL", "schedulefree"],
    stand_ins=["torchvision"],
    common=[
        after("        optimizer.step()", "recorder.step(loss)"),
        after("model = Net()", "recorder.model(model)"),
    ],
    foreprop=[
        after("optimizer = schedulefree", _PARALLELIZE),
        after("train_loader = torch.utils", _SHARD),
    ],
    ddp=[after("model = Net()", _WRAP), after("train_loader = torch.utils", _DEAL)],
)

WGAN_GP = Program(
    name="PyTorch-GAN/wgan_gp",
    repository="eriklindernoren/PyTorch-GAN",
    commit="36d3c77e5ff20ebe0aeefd322326a134a279b93e",
    licence="MIT",
    path="implementations/wgan_gp/wgan_gp.py",
    about="a gradient penalty: backward through a backward pass; a step of one network in five",
    arguments="--n_epochs 2 --batch_size 8".split(),
    packages=["torchvision", "PIL"],
    stand_ins=["torchvision"],
    common=[
        after("parser = argparse", "np.random.seed(0)"),
        after("        optimizer_D.step()", "recorder.step(d_loss)"),
        after("optimizer_G = torch", "recorder.model(generator); recorder.model(discriminator)"),
    ],
    foreprop=[
        before(
            "Tensor = torch.cuda",
            "session_g = foreprop.parallelize(generator, optimizer_G)",
            "session_d = foreprop.parallelize(discriminator, optimizer_D)",
            "dataloader = foreprop.shard(dataloader)",
        ),
    ],
    # DDP does not support autograd.grad with a second backward through it: averaged by hand, as
    # DDP would have
    ddp=[
        before("Tensor = torch.cuda", "dataloader = baseline.deal(dataloader)"),
        after("        d_loss.backward()", "baseline.average(discriminator)"),
        after("            g_loss.backward()", "baseline.average(generator)"),
    ],
)

DINO = Program(
    name="dino",
    repository="facebookresearch/dino",
    commit="7c446df5b9f45747937fb0d72314eb9f7b66930a",
    licence="Apache-2.0",
    path="main_dino.py",
    about="its DDP line left in; two groups, lr and decay set each step, gradients clipped by hand,"
    " some set to None, an averaged teacher",
    paths=["main_dino.py", "utils.py", "vision_transformer.py"],
    arguments="--arch vit_tiny --patch_size 32 --out_dim 256 --batch_size_per_gpu 4 --epochs 2"
    " --use_fp16 false --num_workers 0 --local_crops_number 2 --warmup_epochs 1"
    " --warmup_teacher_temp_epochs 1 --clip_grad 3.0 --freeze_last_layer 1".split(),
    packages=["torchvision", "PIL"],
    stand_ins=["torchvision", "cuda"],
    group=True,
    common=[
        replace('"nccl"', '"gloo"', file="utils.py"),
        replace(' + torch.hub.list("facebookresearch/xcit:main")', ""),
        replace("device='cuda'", "device='cpu'", file="utils.py"),
        replace(", device_ids=[args.gpu]", "", count=2),
        replace(
            "(dataset, shuffle=True)", "(torch.utils.data.Subset(dataset, range(24)), shuffle=True)"
        ),
        before("    data_loader = torch", "dataset = torch.utils.data.Subset(dataset, range(24))"),
        after("metric_logger.update(loss=", "recorder.step(loss)"),
        before("params_groups = utils", "recorder.model(student); recorder.model(teacher)"),
    ],
    foreprop=[before("fp16_scaler = None", "session = foreprop.parallelize(student, optimizer)")],
    ddp=[],
)

TIMM = Program(
    name="timm",
    rounding=CLIPPED,
    repository="huggingface/pytorch-image-models",
    commit="aa4b5850c1543fa488abf260f18390eda46cf85d",
    licence="Apache-2.0",
    path="train.py",
    about="its DDP left in; AdamW, accumulation in no_sync(), clip_grad_norm_, an average of the"
    " model, lr set each step",
    paths=["train.py", "timm"],
    arguments="--dataset torch/cifar10 --data-dir . --model resnet10t --num-classes 10 --opt adamw"
    " --img-size 32 --batch-size 8 --epochs 2 --lr 1e-3 --clip-grad 1.0 --model-ema --workers 1"
    " --device cpu --no-prefetcher --warmup-epochs 0 --experiment one --grad-accum-steps 2"
    " --sched-on-updates".split(),
    packages=["torchvision", "PIL", "yaml", "huggingface_hub", "safetensors"],
    stand_ins=["torchvision"],
    group=True,
    common=[
        replace("device_ids=[device], ", ""),
        after("                    optimizer.step()", "recorder.step(_loss)"),
        before("    # setup checkpoint saver and eval", "recorder.model(model)"),
    ],
    foreprop=[
        before(
            "    # setup checkpoint saver and eval",
            "session = foreprop.parallelize(model, optimizer)",
        )
    ],
    ddp=[],
)

TORCHVISION = Program(
    name="vision/classification",
    repository="pytorch/vision",
    commit="6b1646cae7e4a0118bd769cd9921ff2269561047",
    licence="BSD-3-Clause",
    path="references/classification/train.py",
    about="torchvision's reference, its DDP left in: SGD with two groups, warm-up and cosine, mixup"
    " and cutmix, an average of the model, checkpoints",
    paths=["references/classification"],
    arguments="--model resnet18 --device cpu --workers 0 --batch-size 16 --epochs 3 --print-freq 2"
    " --val-resize-size 32 --val-crop-size 32 --train-crop-size 32 --auto-augment ta_wide"
    " --random-erase 0.1 --label-smoothing 0.1 --mixup-alpha 0.2 --cutmix-alpha 1.0 --lr 0.001"
    " --lr-scheduler cosineannealinglr --lr-warmup-epochs 1 --lr-warmup-method linear"
    " --norm-weight-decay 0.0 --model-ema --model-ema-steps 2 --model-ema-decay 0.99".split(),
    packages=["torchvision", "PIL"],
    stand_ins=["torchvision", "cuda"],
    group=True,
    common=[
        replace('"nccl"', '"gloo"', file="references/classification/utils.py"),
        replace('device="cuda"', 'device="cpu"', file="references/classification/utils.py"),
        replace(", device_ids=[args.gpu]", ""),
        before("metric_logger.update(loss=loss.item(), lr", "recorder.step(loss)"),
        before(
            '    print("Start training")', "recorder.model(model); recorder.model(model_ema.module)"
        ),
    ],
    foreprop=[before('    print("Start training")', _PARALLELIZE)],
    ddp=[replace("torch.nn.parallel.DistributedDataParallel(model)", "baseline.wrap(model)")],
)

IMAGES: Sequence[Program] = (
    MNIST,
    MNIST_RNN,
    VAE,
    DCGAN,
    SUPER_RESOLUTION,
    SIAMESE,
    IMAGENET,
    CIFAR,
    SAM,
    SCHEDULE_FREE,
    WGAN_GP,
    DINO,
    TIMM,
    TORCHVISION,
)
