"""Programs of other kinds: series, graphs, games; and those built on accelerate."""

from __future__ import annotations

from collections.abc import Sequence

from tests.programs.program import CLIPPED, Program, after, before, replace

_EXAMPLES = "pytorch/examples"
_EXAMPLES_COMMIT = "77f55b912142e11fcfdf5b530231fb9c52f181e8"
_PARALLELIZE = "session = foreprop.parallelize(model, optimizer)"
_WRAP = "model = baseline.wrap(model)"
_RANK = "int(__import__('os').environ['RANK'])"

TIME_SEQUENCE = Program(
    name="examples/time_sequence_prediction",
    repository=_EXAMPLES,
    commit=_EXAMPLES_COMMIT,
    licence="BSD-3-Clause",
    path="time_sequence_prediction/train.py",
    about="LBFGS with its closure, float64, LSTMCell",
    arguments=["--steps", "6"],
    stand_ins=["pyplot"],
    common=[
        replace(
            "torch.load('traindata.pt')",
            "np.sin(np.arange(40) / 5 + np.random.RandomState(2).randint(-80, 80, (15, 1)))",
        ),
        replace("future = 1000", "future = 5"),
        after("print('test loss:'", "recorder.step(loss)"),
        before("optimizer = optim.LBFGS(", "recorder.model(seq)"),
    ],
    foreprop=[
        after(
            "optimizer = optim.LBFGS(",
            "session = foreprop.parallelize(seq, optimizer)",
            "input = input[session.rank::session.world_size]",
            "target = target[session.rank::session.world_size]",
        )
    ],
    ddp=[
        after(
            "optimizer = optim.LBFGS(",
            "rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()",
            "input, target = (whole[rank::size] for whole in (input, target))",
        ),
        after("            loss.backward()", "baseline.average(seq)"),
    ],
)

REGRESSION = Program(
    name="examples/regression",
    repository=_EXAMPLES,
    commit=_EXAMPLES_COMMIT,
    licence="BSD-3-Clause",
    path="regression/main.py",
    about="no optimizer: p.data.add_(-0.1 * p.grad)",
    common=[
        before("for batch_idx in count(1):", "recorder.model(fc); recorder.own_seed()"),
        before("    # Stop criterion", "recorder.step(loss)"),
    ],
    steps=20,
    foreprop=[
        before(
            "for batch_idx in count(1):",
            "session = foreprop.parallelize(fc)",
        )
    ],
    ddp=[after("    output.backward()", "baseline.average(fc)")],
)

GCN = Program(
    name="examples/gcn",
    repository=_EXAMPLES,
    commit=_EXAMPLES_COMMIT,
    licence="BSD-3-Clause",
    path="gcn/main.py",
    about="sparse inputs, Adam with weight decay, evaluation after each step",
    arguments=["--epochs", "15"],
    common=[
        replace("import requests", "# import requests"),
        replace("with requests.get(", "if False:  # with requests.get("),
        replace(
            "features, labels, adj_mat = load_cora(device=device)",
            "features, labels, adj_mat = torch.rand(60, 30).to_sparse(),"
            " torch.randint(0, 5, (60,)), torch.eye(60).to_sparse(); recorder.own_seed()",
        ),
        replace("idx[:1000], idx[1000:1500], idx[1500:]", "idx[:10], idx[10:30], idx[30:]"),
        after("optimizer = Adam(", "recorder.model(gcn)"),
        after("    # Evaluate the model performance", "recorder.step(loss)"),
    ],
    foreprop=[after("optimizer = Adam(", "session = foreprop.parallelize(gcn, optimizer)")],
    ddp=[after("optimizer = Adam(", "gcn = baseline.wrap(gcn)")],
)

ACTOR_CRITIC = Program(
    name="examples/actor_critic",
    repository=_EXAMPLES,
    commit=_EXAMPLES_COMMIT,
    licence="BSD-3-Clause",
    path="reinforcement_learning/actor_critic.py",
    about="as many forward passes as the episode has steps, one backward pass; Adam",
    packages=["gymnasium"],
    steps=14,
    common=[
        replace("env.reset(seed=args.seed)", f"env.reset(seed=args.seed + {_RANK})"),
        after("eps = np.finfo", "recorder.model(model); recorder.own_seed()"),
        after("    optimizer.step()", "recorder.step(loss)"),
    ],
    foreprop=[after("optimizer = optim.Adam(", _PARALLELIZE)],
    ddp=[after("optimizer = optim.Adam(", _WRAP)],
)

PPO = Program(
    name="cleanrl/ppo",
    rounding=CLIPPED,
    repository="vwxyzjn/cleanrl",
    commit="fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
    licence="MIT",
    path="cleanrl/ppo.py",
    about="PPO: clip_grad_norm_ each minibatch, lr set each iteration, other methods than forward",
    packages=["gymnasium"],
    stand_ins=["tensorboard"],
    common=[
        replace("import tyro", "# import tyro"),
        replace("tyro.cli(Args)", f"Args(total_timesteps=192, num_steps=16, seed={_RANK})"),
        after("    optimizer = optim.Adam(", "recorder.model(agent)"),
        after("                optimizer.step()", "recorder.step(loss)"),
    ],
    foreprop=[
        after("    optimizer = optim.Adam(", "session = foreprop.parallelize(agent, optimizer)")
    ],
    ddp=[
        after(
            "    optimizer = optim.Adam(",
            "for p in agent.parameters(): torch.distributed.broadcast(p.data, 0)",
        ),
        before("                nn.utils.clip_grad_norm_", "baseline.average(agent)"),
    ],
)

ACCELERATE = Program(
    name="accelerate/nlp_example",
    repository="huggingface/accelerate",
    commit="16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
    licence="Apache-2.0",
    path="examples/nlp_example.py",
    about="BERT (tiny); everything prepared by accelerate, which puts the model into DDP",
    arguments=["--cpu"],
    packages=["torchvision", "transformers", "accelerate"],
    stand_ins=["torchvision"],
    group=True,
    common=[
        replace("import evaluate", "from transformers import BatchEncoding, BertConfig"),
        replace("from datasets import", "# from datasets import"),
        replace(
            'evaluate.load("glue", "mrpc")',
            'type("M", (), {"add_batch": lambda *a, **k: 0, "compute": lambda *a: 0})()',
        ),
        replace(
            "train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)",
            "train_dataloader, eval_dataloader = [DataLoader("
            '[{"input_ids": torch.randint(0, 90, (12,)), "labels": torch.tensor(i % 2)}'
            " for i in range(48)], batch_size=4, shuffle=s, collate_fn=lambda b:"
            " BatchEncoding(torch.utils.data.default_collate(b))) for s in (True, False)]",
        ),
        replace(
            '.from_pretrained("bert-base-cased", return_dict=True)',
            ".from_config(BertConfig(vocab_size=90, hidden_size=32,"
            " num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,"
            " hidden_dropout_prob=0.0))",
        ),
        after("            accelerator.backward(loss)", "recorder.step(loss)"),
        after("    optimizer = AdamW(", "recorder.model(model)"),
    ],
    foreprop=[before("    # Now we train the model", _PARALLELIZE)],
    ddp=[],
)

ACCELERATE_BEFORE = Program(
    name="accelerate/nlp_example, before prepare",
    repository=ACCELERATE.repository,
    commit=ACCELERATE.commit,
    licence=ACCELERATE.licence,
    path=ACCELERATE.path,
    about="the same, with parallelize before accelerate's prepare",
    arguments=ACCELERATE.arguments,
    packages=ACCELERATE.packages,
    stand_ins=ACCELERATE.stand_ins,
    group=True,
    common=ACCELERATE.common,
    foreprop=[after("    optimizer = AdamW(", _PARALLELIZE)],
    ddp=[],
)

DIFFUSERS = Program(
    name="diffusers/train_unconditional",
    rounding=CLIPPED,
    repository="huggingface/diffusers",
    commit="58eb52c0803ea9af3abec60841c2a093bdf1f951",
    licence="Apache-2.0",
    path="examples/unconditional_image_generation/train_unconditional.py",
    about="a small U-Net prepared by accelerate: accumulate(), clip_grad_norm_, an average of the"
    " model, checkpoints of everything",
    paths=["examples/unconditional_image_generation/train_unconditional.py", "src/diffusers"],
    arguments="--train_data_dir none --resolution 32 --train_batch_size 2 --num_epochs 2"
    " --gradient_accumulation_steps 2 --use_ema --output_dir out --checkpointing_steps 5"
    " --save_images_epochs 9 --save_model_epochs 2 --ddpm_num_steps 10 --lr_warmup_steps 2"
    " --ddpm_num_inference_steps 10"
    " --dataloader_num_workers 0".split(),
    packages=["torchvision", "PIL", "accelerate", "huggingface_hub", "importlib_metadata"],
    stand_ins=["torchvision", "tensorboard", "datasets"],
    group=True,
    common=[
        replace("if not is_tensorboard_available():", "if False:"),
        replace("log_with=args.logger", "log_with=None"),
        replace(
            'tracker.add_images("test_samples", images_processed.transpose(0, 3, 1, 2), epoch)',
            "pass",
        ),
        before("import diffusers", "import sys; sys.path.insert(0, os.path.abspath('../../src'))"),
        replace(
            'load_dataset("imagefolder", data_dir=args.train_data_dir, cache_dir='
            'args.cache_dir, split="train")',
            "load_dataset()",
        ),
        replace("(128, 128, 256, 256, 512, 512)", "(32, 32, 32, 32, 32, 32)"),
        replace("layers_per_block=2", "layers_per_block=1"),
        after("    # Initialize the optimizer", "recorder.model(model)"),
        after("                accelerator.backward(loss)", "recorder.step(loss)"),
        after("    # Initialize the learning rate", "recorder.own_seed()"),
    ],
    foreprop=[before("    # We need to initialize the trackers", _PARALLELIZE)],
    ddp=[],
)

OTHERS: Sequence[Program] = (
    TIME_SEQUENCE,
    REGRESSION,
    GCN,
    ACTOR_CRITIC,
    PPO,
    ACCELERATE,
    ACCELERATE_BEFORE,
    DIFFUSERS,
)
