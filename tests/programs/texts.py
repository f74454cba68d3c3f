"""Programs that learn from text."""

from __future__ import annotations

from collections.abc import Sequence

from tests.programs.program import CLIPPED, Program, after, before, replace

_EXAMPLES = "pytorch/examples"
_EXAMPLES_COMMIT = "77f55b912142e11fcfdf5b530231fb9c52f181e8"
_PARALLELIZE = "session = foreprop.parallelize(model, optimizer)"
_WRAP = "model = baseline.wrap(model)"

_NANOGPT_COMMON = [
    before(
        "# poor man's data loader",
        "os.makedirs(os.path.join('data', dataset), exist_ok=True)",
        "for name in ('train.bin', 'val.bin'):",
        "    np.random.default_rng(0).integers(0, 60, 4000).astype(np.uint16).tofile("
        "os.path.join('data', dataset, name))",
    ),
    replace("device = f'cuda:{ddp_local_rank}'", "device = 'cpu'"),
    replace("torch.cuda.set_device(device)", "pass"),
    replace(", device_ids=[ddp_local_rank]", ""),
    after("optimizer = model.configure_optimizers(", "recorder.model(model)"),
    after("    optimizer.zero_grad(set_to_none=True)", "recorder.step(loss)"),
]
_NANOGPT = {
    "repository": "karpathy/nanoGPT",
    "commit": "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    "licence": "MIT",
    "path": "train.py",
    "paths": ["train.py", "model.py", "configurator.py"],
    "group": True,
}
_NANOGPT_ARGUMENTS = (
    "--device=cpu --backend=gloo --compile=False --dtype=float32 --dataset=random --batch_size=2"
    " --block_size=32 --n_layer=2 --n_head=2 --n_embd=32 --max_iters=14 --eval_interval=5"
    " --eval_iters=2 --gradient_accumulation_steps=6 --warmup_iters=3 --lr_decay_iters=12"
).split()

NANOGPT = Program(
    name="nanoGPT",
    rounding=CLIPPED,
    about="AdamW with two groups, accumulation, clip_grad_norm_, lr set each step, checkpoints",
    arguments=_NANOGPT_ARGUMENTS,
    common=_NANOGPT_COMMON,
    foreprop=[
        replace("model = DDP(model)", _PARALLELIZE),
        replace("model.module if ddp else model", "model"),
    ],
    **_NANOGPT,
)
NANOGPT_LEFT_IN = Program(
    name="nanoGPT, DDP left in",
    rounding=CLIPPED,
    about="the same, with its DDP line left in",
    arguments=_NANOGPT_ARGUMENTS,
    common=_NANOGPT_COMMON,
    foreprop=[after("model = DDP(model)", _PARALLELIZE)],
    **_NANOGPT,
)

MINGPT = Program(
    name="minGPT/adder",
    rounding=CLIPPED,
    repository="karpathy/minGPT",
    commit="37baab71b9abea1b76ab957409a1cc2fbfba8a26",
    licence="MIT",
    path="projects/adder/adder.py",
    about="a Trainer class, clip_grad_norm_, samples drawn with replacement",
    paths=["projects/adder", "mingpt"],
    arguments=["--trainer.max_iters=16", "--trainer.num_workers=0", "--trainer.batch_size=8"],
    common=[
        before("from mingpt.model import GPT", "sys.path.insert(0, os.path.abspath('../..'))"),
        after("set_seed(config.system.seed)", "import random"),
        before("    trainer.run()", "recorder.own_seed()"),
        replace("trainer.iter_num % 500 == 0", "trainer.iter_num == 10"),
        after("    def batch_end_callback(trainer):", "    recorder.step(trainer.loss)"),
        after("    model = GPT(", "recorder.model(model)"),
        replace("{1: None, 2: None, 3: 5}[config.data.ndigit]", "2"),
        replace("'test',  max_batches=None", "'test',  max_batches=1"),
    ],
    foreprop=[
        after(
            "self.optimizer = model.configure_optimizers(",
            "session = foreprop.parallelize(model, self.optimizer)",
            file="mingpt/trainer.py",
        )
    ],
    ddp=[
        after(
            "self.optimizer = model.configure_optimizers(",
            "model = baseline.wrap(model)",
            file="mingpt/trainer.py",
        )
    ],
)

MAKEMORE = Program(
    name="makemore",
    repository="karpathy/makemore",
    commit="988aa59e4d8fefa526d06f3b453ad116258398d4",
    licence="MIT",
    path="makemore.py",
    about="AdamW, an endless loader with replacement, evaluation and sampling in between",
    arguments="--max-steps 16 --num-workers 0 --batch-size 8 --n-layer 2 --n-embd 32".split(),
    stand_ins=["tensorboard"],
    common=[
        before(
            "    train_dataset, test_dataset = create_datasets(",
            "names = torch.randint(97, 123, (400, 6), generator=torch.Generator().manual_seed(1))",
            "names = [''.join(map(chr, name)) for name in names.tolist()]",
            "open(args.input_file, 'w').write('\\n'.join(names))",
        ),
        before("    # training loop", "recorder.own_seed()"),
        replace("step % 500 == 0", "step % 8 == 0"),
        before("        # wait for all CUDA work", "recorder.step(loss)"),
        before("    # init optimizer", "recorder.model(model)"),
    ],
    foreprop=[after("    optimizer = torch.optim.AdamW(", _PARALLELIZE)],
    ddp=[after("    optimizer = torch.optim.AdamW(", _WRAP)],
)

_WORDS = [
    before(
        "corpus = data.Corpus(",
        "os.makedirs(args.data, exist_ok=True)",
        "for name, seed in (('train', int(os.environ['RANK'])), ('valid', 100), ('test', 101)):",
        "    words = torch.randint(0, 50, (40, 20), generator=torch.Generator().manual_seed(seed))",
        "    words = [list(range(50)), *words.tolist()]",
        "    open(os.path.join(args.data, name + '.txt'), 'w').write("
        "'\\n'.join(' '.join(map(str, line)) for line in words))",
    ),
    after("        total_loss += loss.item()", "recorder.step(loss)"),
    before("criterion = nn.NLLLoss()", "recorder.model(model)"),
]
_WORD_MODEL = {
    "repository": _EXAMPLES,
    "commit": _EXAMPLES_COMMIT,
    "licence": "BSD-3-Clause",
    "path": "word_language_model/main.py",
    "paths": [f"word_language_model/{name}.py" for name in ("main", "data", "model")],
}

WORD_LANGUAGE_MODEL = Program(
    name="examples/word_language_model",
    rounding=CLIPPED,
    about="LSTM; SGD written by hand on p.grad after clip_grad_norm_; torch.save(model)",
    arguments="--epochs 2 --emsize 16 --nhid 16 --batch_size 5 --bptt 20 --lr 5".split(),
    common=_WORDS,
    foreprop=[
        after(
            "criterion = nn.NLLLoss()",
            "session = foreprop.parallelize(model)",
        )
    ],
    ddp=[
        after("        loss.backward()", "baseline.average(model)"),
    ],
    **_WORD_MODEL,
)
WORD_TRANSFORMER = Program(
    name="examples/word_language_model, Transformer",
    tolerance=0.02,  # the keys' bias has no gradient but rounding, of which AdamW makes whole steps
    rounding=CLIPPED,
    about="its --use-optimizer: AdamW after clip_grad_norm_; torch.save(model)",
    arguments="--epochs 2 --model Transformer --use-optimizer --emsize 16 --nhid 16 --batch_size 5"
    " --bptt 20 --lr 0.01".split(),
    common=_WORDS,
    foreprop=[after("    optimizer = torch.optim.AdamW(", _PARALLELIZE)],
    ddp=[after("        loss.backward()", "baseline.average(model)")],
    **_WORD_MODEL,
)

ATTENTION = Program(
    name="attention-is-all-you-need",
    repository="jadore801120/attention-is-all-you-need-pytorch",
    commit="132907dd272e2cc92e3c10e6c4e783a87ff8893d",
    licence="MIT",
    path="train.py",
    about="a schedule that sets lr between backward() and step(), tied embeddings",
    paths=["train.py", "transformer"],
    arguments="-data_pkl none -epoch 2 -b 4 -d_model 32 -d_inner_hid 32 -d_k 8 -d_v 8 -n_head 2"
    " -n_layers 1 -warmup 8 -seed 3 -output_dir out -no_cuda -embs_share_weight"
    " -proj_share_weight -label_smoothing".split(),
    packages=["tqdm"],
    common=[
        replace("import dill as pickle", "from types import SimpleNamespace"),
        replace("from torchtext.data import", "# from torchtext.data import"),
        replace("from torchtext.datasets import", "# from torchtext.datasets import"),
        replace(
            "training_data, validation_data = prepare_dataloaders(opt, device)",
            "opt.src_pad_idx = opt.trg_pad_idx = 1; opt.src_vocab_size = opt.trg_vocab_size = 40;"
            " recorder.own_seed(); training_data = validation_data = [SimpleNamespace("
            "src=torch.randint(2, 40, (12, 4)), trg=torch.randint(2, 40, (12, 4)))"
            " for _ in range(8)]; torch.manual_seed(opt.seed)",
        ),
        before("    train(transformer, training_data", "recorder.model(transformer)"),
        after("        optimizer.step_and_update_lr()", "recorder.step(loss)"),
    ],
    foreprop=[
        before(
            "    train(transformer, training_data",
            "session = foreprop.parallelize(transformer, optimizer._optimizer)",
        )
    ],
    ddp=[
        before("    train(transformer, training_data", "transformer = baseline.wrap(transformer)")
    ],
)

_X_TRANSFORMERS = {
    "repository": "lucidrains/x-transformers",
    "commit": "9252ed7838021ee61e6c5be0930b3a9a88efdf06",
    "licence": "MIT",
}
_X_PACKAGES = ["einops", "einx", "loguru", "torch_einops_utils", "tqdm"]

X_TRANSFORMERS = Program(
    name="x-transformers/train_copy",
    path="train_copy.py",
    about="an encoder and a decoder, tied embeddings, Adam, generation in between",
    paths=["train_copy.py", "x_transformers"],
    packages=_X_PACKAGES,
    common=[
        replace("BATCH_SIZE = 32", "BATCH_SIZE = 4"),
        replace("int(1e5)", "14"),
        replace("GENERATE_EVERY  = 100", "GENERATE_EVERY = 6"),
        replace("dim = 128", "dim = 32"),
        before("# training", "recorder.model(model); recorder.own_seed()"),
        after("    optim.zero_grad()", "recorder.step(loss)"),
    ],
    foreprop=[after("optim = torch.optim.Adam(", "session = foreprop.parallelize(model, optim)")],
    ddp=[after("optim = torch.optim.Adam(", _WRAP)],
    **_X_TRANSFORMERS,
)

MUON = Program(
    name="x-transformers/train_with_muon",
    rounding=CLIPPED,
    path="train_with_muon.py",
    about="Muon for matrices beside an Adam for the rest, accumulation, clip_grad_norm_",
    paths=["train_with_muon.py", "x_transformers"],
    packages=[*_X_PACKAGES, "adam_atan2_pytorch"],
    stand_ins=["cuda"],
    common=[
        replace("int(1e5)", "10"),
        replace("SEQ_LEN = 1024", "SEQ_LEN = 32"),
        replace("GENERATE_LENGTH = 1024", "GENERATE_LENGTH = 8"),
        replace("GENERATE_EVERY  = 500", "GENERATE_EVERY = 6"),
        replace("VALIDATE_EVERY  = 100", "VALIDATE_EVERY = 4"),
        replace("dim = 512", "dim = 32"),
        replace("depth = 6", "depth = 2"),
        replace("with gzip.open(", "for _ in '1':  # with gzip.open("),
        replace(
            "data = np.frombuffer(",
            "data = np.random.default_rng(0).integers(0, 256, 6000)"
            ".astype(np.uint8)  # np.frombuffer(",
        ),
        replace("int(90e6)", "5000"),
        before("# training", "recorder.model(model); recorder.own_seed()"),
        after("    optim.zero_grad()", "recorder.step(loss)"),
    ],
    foreprop=[before("# training", "session = foreprop.parallelize(model, optim)")],
    ddp=[before("    torch.nn.utils.clip_grad_norm_", "baseline.average(model)")],
    **_X_TRANSFORMERS,
)

GLUE = Program(
    name="transformers/run_glue_no_trainer",
    repository="huggingface/transformers",
    commit="f0107862189b461755bb0bd86a28424060cb2fd2",
    licence="Apache-2.0",
    path="examples/pytorch/text-classification/run_glue_no_trainer.py",
    about="BERT (tiny) of transformers in accelerate's DDP; AdamW with two groups, a schedule,"
    " checkpoints of everything, evaluation each epoch",
    arguments="--task_name mrpc --model_name_or_path tiny --per_device_train_batch_size 4"
    " --weight_decay 0.1 --learning_rate 1e-4 --num_train_epochs 2 --num_warmup_steps 4"
    " --output_dir out --checkpointing_steps epoch".split(),
    packages=["torchvision", "transformers", "accelerate", "tokenizers", "huggingface_hub"],
    stand_ins=["torchvision", "glue"],
    group=True,
    common=[
        replace(", send_example_telemetry", ""),
        replace('send_example_telemetry("run_glue_no_trainer", args)', "pass"),
        replace('require_version("datasets>=1.8.0", ', "("),
        replace("(8 if accelerator.use_fp16 else None)", "None"),
        before(
            "    # Load pretrained model and tokenizer",
            "from transformers import BertConfig, BertForSequenceClassification, BertTokenizer",
            "words = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *map(str, range(50))]",
            "BertTokenizer(vocab={w: i for i, w in enumerate(words)}).save_pretrained('tiny')",
            "config = BertConfig(vocab_size=55, hidden_size=32, num_hidden_layers=2,"
            " num_attention_heads=2, intermediate_size=48)",
            "config.save_pretrained('tiny')",
            "import safetensors.torch",
            "model = BertForSequenceClassification(config)",
            "for p in model.parameters(): p.data.add_(0.1 * torch.randn_like(p))",
            "safetensors.torch.save_file(model.state_dict(), 'tiny/model.safetensors',"
            " metadata={'format': 'pt'})",
        ),
        before("    # Scheduler and math around", "recorder.model(model)"),
        after("            accelerator.backward(loss)", "recorder.step(loss)"),
    ],
    foreprop=[before("    # We need to recalculate our total", _PARALLELIZE)],
    ddp=[],
)

TEXTS: Sequence[Program] = (
    NANOGPT,
    NANOGPT_LEFT_IN,
    MINGPT,
    MAKEMORE,
    WORD_LANGUAGE_MODEL,
    WORD_TRANSFORMER,
    ATTENTION,
    X_TRANSFORMERS,
    MUON,
    GLUE,
)
