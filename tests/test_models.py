"""Kinds of models that people train, each by the Trainer: every stage against ``ddp``, to the bit.

By default each kind runs under stage 3, with ``--full`` under all of them.
"""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
import transformers
from harness import distributed
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from peft import LoraConfig, get_peft_model
from test_strategy import STAGES, trainer, zero
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ZeroStrategy

STEPS, BATCH, RANKS = 5, 2, 2
VOCABULARY, LENGTH, DIM = 24, 6, 8
CHECKPOINTING = {"": None, "-recomputed": False, "-reentrant": True}
KINDS = []


def kind(name, *marks, full=False):
    """Enter a function that makes a model; ``full``: left out without ``--full``."""

    def enter(make):
        KINDS.append(pytest.param(make, id=name, marks=[*marks, pytest.mark.full] if full else marks))
        return make

    return enter


def tokens(rows):
    return (torch.randint(VOCABULARY, (rows, LENGTH)),)


def images(rows):
    return torch.randn(rows, 3, 8, 8), torch.randint(3, (rows,))


def numbers(rows):
    return torch.randn(rows, DIM), torch.randn(rows, 1)


def sequences(rows):
    return torch.randn(rows, LENGTH, DIM), torch.randn(rows, 1)


class Trained(LightningModule):
    """A module with a loss; ``data`` makes its batches."""

    settings, ddp_settings = {}, {}
    own_buffers = False  # whether each rank ends with buffers of its own, of which the file has rank 0's
    fused_in_eval = False  # whether torch has another operation for a module without hooks, which rounds differently
    compiled, backend = False, None  # whether any of it is; what compiles the whole module

    def __init__(self, model, data=numbers, **settings):
        super().__init__()
        self.model, self.data, self.settings = model, data, settings

    def output(self, x, y):
        return self.model(x)

    def on_train_start(self):
        strategy = self.trainer.strategy
        assert not isinstance(strategy, ZeroStrategy) or len(strategy.engine.units) > 2, "the blocks are no units"

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.output(*batch), batch[1])

    def predict_step(self, batch, batch_idx):
        return self.output(*batch)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Transformer(Trained):
    """A model of ``transformers``, which has its loss in its output."""

    def training_step(self, batch, batch_idx):
        return self.model(batch[0], labels=batch[-1]).loss

    def output(self, x, y=None):
        return self.model(x, labels=x if y is None else y).logits


class Generating(Transformer):
    def predict_step(self, batch, batch_idx):
        # as many tokens on all ranks: the forwards of a step are collective
        return self.model.generate(batch[0], min_new_tokens=LENGTH, max_new_tokens=LENGTH, do_sample=False)


def gpt2():
    config = {"vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 3, "n_head": 2}
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=2 * LENGTH, **config, **special))


SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=1, **SMALL))


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(max_position_embeddings=LENGTH, **SMALL))


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    )


def mixtral():
    config = transformers.MixtralConfig(
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, **SMALL
    )
    return transformers.MixtralForCausalLM(config)


def vit():
    config = {**SMALL, "image_size": 8, "patch_size": 4, "num_labels": 3, "hidden_dropout_prob": 0.1}
    del config["vocab_size"]
    return transformers.ViTForImageClassification(transformers.ViTConfig(**config))


def transformer(make, use_reentrant, **options):
    model = make()
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return Transformer(model, **{"data": tokens, **options})


# experts are units of their own, beside the attention of their block
EXPERTS = {"leaf_classes": ("MixtralSparseMoeBlock",), "unit_classes": ("MixtralAttention",)}
OPTIONS = {mixtral: EXPERTS, vit: {"data": images}}
for make_model, (suffix, reentrant) in itertools.product((gpt2, llama, bert, t5, mixtral, vit), CHECKPOINTING.items()):
    make = functools.partial(transformer, make_model, reentrant, **OPTIONS.get(make_model, {}))
    kind(make_model.__name__ + suffix, full=make_model is not gpt2 and reentrant is not None)(make)


kind("gpt2-generate")(lambda: Generating(gpt2(), tokens))


class Adapter(nn.Module):
    """A frozen layer in bf16 and a low-rank correction in fp32."""

    def __init__(self, base):
        super().__init__()
        self.base = base.bfloat16().requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x.float())).to(x.dtype)


@kind("lora")
def lora():
    model = llama().bfloat16().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
        layer.mlp.down_proj = Adapter(layer.mlp.down_proj)
    return Transformer(model, tokens)


def peft(use_reentrant):
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    model = get_peft_model(llama().bfloat16(), config)
    if use_reentrant is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return Transformer(model, tokens)


for suffix, reentrant in CHECKPOINTING.items():
    kind("peft" + suffix, full=not reentrant)(functools.partial(peft, reentrant))


class Encoder(nn.Module):
    """Torch's own transformers: in eval mode each layer is one fused operation that reads its weights."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 2, 12, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(DIM, 1)

    def forward(self, x):
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[0, -2:] = True  # padded batches are nested tensors there
        return self.head(self.encoder(x, src_key_padding_mask=padding)[:, 0])


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = nn.Transformer(DIM, 2, 2, 2, 12, batch_first=True)
        self.head = nn.Linear(DIM, 1)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.head(self.both(x, x.flip(1), tgt_mask=mask, tgt_is_causal=True)[:, -1])


@kind("nn.TransformerEncoder")
def encoder():
    module = Trained(Encoder(), sequences)
    module.fused_in_eval = True
    return module


kind("nn.Transformer")(lambda: Trained(EncoderDecoder(), sequences))


def layers(*hidden):
    """Blocks that become units."""
    return nn.Sequential(*(hidden or [block() for _ in range(3)]), nn.Linear(DIM, 1))


def block():
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())


@kind("gan")
class Gan(Trained):
    """Two networks and two optimizers that take turns."""

    ddp_settings = {"find_unused_parameters": True}

    def __init__(self):
        super().__init__(layers(block(), nn.Linear(DIM, DIM)))
        self.critic = layers()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer, module in zip(self.optimizers(), (self.model, self.critic), strict=True):
            with optimizer.toggle_model():
                made = self.critic(self.model[:2](batch[0]))
                loss = -made.mean() if module is self.model else made.mean() - self.critic(batch[0]).mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.AdamW(module.parameters(), lr=0.01) for module in (self.model, self.critic)]


@kind("teacher")
class Student(Trained):
    """A frozen teacher in the same module."""

    def __init__(self):
        super().__init__(layers(block()))
        self.teacher = layers().requires_grad_(False).eval()

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            wanted = self.teacher(batch[0])
        return F.mse_loss(self.model(batch[0]), wanted) + super().training_step(batch, batch_idx)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = nn.ModuleList(
            [nn.LSTM(DIM, DIM, 2, batch_first=True, dropout=0.1), nn.LSTM(DIM, 4, bidirectional=True, batch_first=True)]
        )
        self.cell, self.head = nn.LSTMCell(DIM, DIM), nn.Linear(DIM, 1)

    def forward(self, x):
        for layer in self.stack:
            x, _ = layer(x)
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0])


kind("lstm")(lambda: Trained(Recurrent(), sequences))


@kind("batch_norm")
class Normed(Trained):
    own_buffers = True  # of ranks that see different batches

    def __init__(self):
        def conv(inner):
            return nn.Sequential(nn.Conv2d(inner, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())

        super().__init__(nn.Sequential(conv(3), conv(4), nn.Flatten(), nn.LazyLinear(3)), images)
        self.model(torch.zeros(1, 3, 8, 8))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.model(batch[0]), batch[1])


def weight_normed(norm):
    return Trained(layers(*(nn.Sequential(norm(nn.Linear(DIM, DIM)), nn.Tanh()) for _ in range(2))))


kind("weight_norm-parametrized")(functools.partial(weight_normed, nn.utils.parametrizations.weight_norm))
kind("weight_norm-hook")(functools.partial(weight_normed, nn.utils.weight_norm))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Stack(nn.Module):
    """Not an ``nn.Sequential``: frames of torch's own modules are left as they are by ``module.compile()``."""

    def __init__(self, wrap=None):
        super().__init__()
        blocks = [Block() for _ in range(3)]
        self.blocks = nn.ModuleList([wrap(block) for block in blocks] if wrap else blocks)
        self.head = nn.Linear(DIM, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Borrowing(Stack):
    """Compiled code reads weights of blocks that do not run."""

    def forward(self, x):
        decay = self.blocks[0].linear.weight.square().mean()
        return super().forward(x) * decay + self.blocks[1].linear.weight.mean()


class Compiled(Trained):
    compiled = True

    def __init__(self, model, backend=None):
        super().__init__(model)
        self.backend = backend


def compiled(how, backend):
    """Compiled blocks, a compiled inner module or a compiled LightningModule, in place or wrapped."""
    wrap = functools.partial(torch.compile, backend=backend)
    if how == "wrapped_blocks":
        return Compiled(Stack(wrap))
    model = Borrowing() if how == "borrowing" else Stack()
    for module in {"blocks": model.blocks, "inner": [model], "borrowing": [model]}.get(how, ()):
        module.compile(backend=backend)
    return Compiled(wrap(model) if how == "wrapped_inner" else model, backend if how == "module" else None)


SOME = [("blocks", "aot_eager"), ("module", "eager"), ("borrowing", "eager")]
WAYS = ("blocks", "wrapped_blocks", "inner", "wrapped_inner", "module", "borrowing")
for way in itertools.product(WAYS, ("eager", "aot_eager")):
    kind(f"compiled_{way[0]}-{way[1]}", full=way not in SOME)(functools.partial(compiled, *way))


def made(make, seed):
    torch.manual_seed(seed)
    return make()


def loader(model, batches):
    torch.manual_seed(1)
    return DataLoader(TensorDataset(*model.data(BATCH * batches)), batch_size=BATCH)


def wrapped(model):
    return torch.compile(model, backend=model.backend) if model.backend else model


def fitted(rank, folder, strategy, make):
    """A trained model and its Trainer."""
    model = made(make, seed=0)
    runner = trainer(rank, RANKS, folder, strategy)
    data = loader(model, STEPS * RANKS)
    torch.manual_seed(2 + rank)  # dropout
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    torch._dynamo.reset()
    runner.fit(wrapped(model), data)
    assert bool(graphs["unique_graphs"]) == model.compiled, "nothing has been compiled, or something else"
    assert runner.global_step in (STEPS, 2 * STEPS)  # of two optimizers
    return model, runner


def hooks(module):
    """How many each module has, without those by which ``transformers`` collects outputs."""
    both = [[*m._forward_pre_hooks.values(), *m._forward_hooks.values()] for m in module.modules()]
    return [len([hook for hook in some if not hook.__module__.startswith("transformers")]) for some in both]


@distributed(world_size=RANKS, timeout=180)
@pytest.mark.parametrize("make", KINDS)
def test_equal_to_ddp_to_the_bit(rank, world_size, make, tmp_path, full):
    first = made(make, seed=0)
    want, _ = fitted(rank, tmp_path, DDPStrategy(**first.ddp_settings), make)
    state = want.state_dict()
    moved = [name for name, value in first.state_dict().items() if not torch.equal(value, state[name])]
    assert moved, "nothing has been trained"
    for stage in STAGES if full else (3,):
        strategy = zero(stage, **first.settings)
        model, runner = fitted(rank, tmp_path, strategy, make)
        assert hooks(model) == hooks(first), "hooks are left that are not the model's own"
        got = model.state_dict()
        assert list(got) == list(state)
        for name, value in state.items():
            assert got[name].dtype == value.dtype and got[name].shape == value.shape, (stage, name)
            assert torch.equal(got[name], value), f"stage {stage}: {name}"
        runner.save_checkpoint(tmp_path / "model.ckpt")
        assert_predicts_the_same(rank, tmp_path, make, model, zero(stage, **first.settings))


def assert_predicts_the_same(rank, folder, make, model, strategy):
    """A new module with the weights of the checkpoint predicts what the trained one does."""
    fresh = made(make, seed=9)
    fresh.load_state_dict(torch.load(folder / "model.ckpt", weights_only=True)["state_dict"])
    data = loader(model, 2)
    runner = trainer(rank, RANKS, folder, strategy, use_distributed_sampler=False)
    outputs = runner.predict(wrapped(fresh), data)
    model.eval()
    with torch.no_grad():
        for batch, output in zip(data, outputs, strict=True):
            if rank == 0 or not model.own_buffers:
                tolerance = 1e-5 if model.fused_in_eval else 0
                torch.testing.assert_close(output, model.predict_step(batch, 0), rtol=tolerance, atol=tolerance)
