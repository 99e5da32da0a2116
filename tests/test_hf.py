"""examples/hf_causal_lm.py: a causal LM of transformers, trained with DeepSpeed's JSON and saved for transformers."""

import json
import re
import sys

import forked
import pytest
import torch
from forked import TORCHRUN
from harness import run_ranks
from peft import PeftModel
from test_examples import EXAMPLES
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(EXAMPLES))
import hf_causal_lm
from hf_data import byte_tokenizer, windows

ZERO_2 = {
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "contiguous_gradients": True,
        "overlap_comm": True,
    },
    "bf16": {"enabled": True},
    "train_batch_size": 32,
    "gradient_accumulation_steps": 4,
}
ZERO_3 = {
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
        "stage3_gather_16bit_weights_on_model_save": True,
    }
}
AUTO = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
WARMUP = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": 2,
        "total_num_steps": "auto",
        "warmup_type": "linear",
    },
}


def apart(fn, *args):
    """In a process of its own: tokenizers and transformers leave threads behind, and forks of that may hang."""
    return run_ranks(lambda rank, world_size: fn(*args), 1, timeout=200)[0]


SHORT = ["--devices=2", "--block_size=32", "--logging_steps=1", "--learning_rate=1e-2"]


def write(config, folder):
    """The configuration as a file."""
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    return str(path)


def train(*words, cwd):
    """On two ranks of torchrun; what was printed."""
    script = str(EXAMPLES / "hf_causal_lm.py")
    output, code = forked.run(*TORCHRUN, "--standalone", "--nproc-per-node=2", script, *words, *SHORT, cwd=cwd)
    assert code == 0, output
    assert_same_generation(output)
    return output


def losses(output):
    """Those that were printed."""
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+),", output, re.MULTILINE)]


def assert_same_generation(output):
    """Of the trained module and of the folder, to the bit."""
    assert output.strip().endswith("the same 40 tokens; logits differ by at most 0."), output


@torch.no_grad()
def loss_of(model):
    """On the beginning of the text."""
    batch = torch.stack(windows(byte_tokenizer(), None, 32)[:32])
    return model.eval()(input_ids=batch, labels=batch).loss.item()


def random_base(folder):
    """A small Llama as from_pretrained finds it."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("config", [ZERO_2, pytest.param(ZERO_3, marks=pytest.mark.full)], ids=["zero2", "zero3"])
def test_a_model_is_trained_by_a_deepspeed_json_and_loads_in_transformers(config, tmp_path):
    def check():
        model = hf_causal_lm.load(str(tmp_path / "out"))
        assert loss_of(model) < first - 1 and model.dtype == torch.float32
        assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 256

    arguments = [f"--deepspeed={write(config, tmp_path)}", f"--output_dir={tmp_path / 'out'}", "--max_steps=5"]
    output = train(*arguments, cwd=tmp_path)
    first, *_, last = losses(output)
    assert len(losses(output)) == 5 and last < first - 1, output
    apart(check)
    if config is ZERO_2:
        assert "32 samples a step, 4 batches, 2 ranks" in output, output


def train_adapter(config, tmp_path, *words):
    """Check that an adapter learns and loads."""

    def check():
        plain = hf_causal_lm.load(base)
        before = loss_of(plain)
        assert loss_of(PeftModel.from_pretrained(plain, tmp_path / "lora")) < before - 0.1

    base = apart(random_base, tmp_path / "base")
    arguments = [f"--deepspeed={write(config, tmp_path)}", f"--output_dir={tmp_path / 'lora'}", "--max_steps=6"]
    arguments += [f"--model_name_or_path={base}", "--lora_rank=4", "--bf16", "--per_device_train_batch_size=4"]
    output = train(*arguments, *words, cwd=tmp_path)
    files = {path.name for path in (tmp_path / "lora").iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    assert losses(output)[-1] < losses(output)[0], output
    apart(check)
    return output


def test_an_adapter_is_trained_by_a_json_that_leaves_all_to_the_arguments(tmp_path):
    output = train_adapter(AUTO, tmp_path, "--gradient_accumulation_steps=2", "--max_grad_norm=1")
    assert "micro_batch_size=4, gradient_accumulation_steps=2, gradient_clipping=1.0, precision='bf16-true'" in output


@pytest.mark.full
def test_optimizer_and_scheduler_of_a_json_take_their_values_from_the_arguments(tmp_path):
    config = {**AUTO, "optimizer": ADAMW, "scheduler": WARMUP}
    output = train_adapter(config, tmp_path, "--weight_decay=0.1", "--gradient_checkpointing")
    assert "configure_optimizers of CausalLM is not called" in output, output
    assert "step 3: " in output and "learning rate 0.01\n" in output, output


@pytest.mark.full
def test_a_loaded_model_is_trained_without_a_json(tmp_path):
    """On ranks that Lightning starts."""
    base, text = apart(random_base, tmp_path / "base"), tmp_path / "text.txt"
    text.write_text("A text of one's own. " * 200)
    arguments = [f"--model_name_or_path={base}", f"--train_file={text}", "--stage=3", "--num_train_epochs=2"]
    arguments += [f"--output_dir={tmp_path / 'out'}", "--warmup_steps=2", "--gradient_checkpointing"]
    output, code = forked.run(str(EXAMPLES / "hf_causal_lm.py"), *arguments, *SHORT, cwd=tmp_path)
    assert code == 0, output
    assert_same_generation(output)
    assert losses(output)[-1] < losses(output)[0] - 1, output
    assert "step 1: " in output and "learning rate 0\n" in output, output


@pytest.mark.parametrize(
    ("config", "given", "says"),
    [
        (
            ZERO_2,
            {"gradient_accumulation_steps": 2},
            "steps=2 of ZeroStrategy and 4 of .* differ",
        ),
        (ZERO_2, {"per_device_train_batch_size": 3}, "train_batch_size=32, micro_batch_size=3"),
        (ZERO_2, {"fp16": True}, "'16-true' of ZeroStrategy and 'bf16-true' of .* differ"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
            {"learning_rate": 1e-4},
            "--learning_rate 0.0001 and AdamW of .*, which has lr=0.001",
        ),
        ({"optimizer": ADAMW}, {"warmup_steps": 5}, "--warmup_steps 5 .* which has no warmup_num_steps"),
    ],
)
def test_arguments_that_contradict_the_json_are_errors(config, given, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        hf_causal_lm.make_strategy(hf_causal_lm.Arguments(deepspeed=write(config, tmp_path), **given))


def test_arguments_that_agree_with_the_json_are_none(tmp_path):
    given = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4, "bf16": True, "learning_rate": 1e-3}
    strategy = hf_causal_lm.make_strategy(hf_causal_lm.Arguments(deepspeed=write(ZERO_2, tmp_path), **given))
    assert strategy.config.stage == 2 and strategy.training.micro_batch_size == 4


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--learning_rates 1", "unrecognized arguments: --learning_rates"),
        ("--learning 1", "unrecognized arguments: --learning"),
        ("--deepspeed x.json --stage 2", "the JSON of --deepspeed says it"),
        ("--lora_rank 4", "an adapter needs weights"),
        ("--bf16 --fp16 True", "choose one of them"),
    ],
)
def test_wrong_arguments_are_refused(words, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hf_causal_lm.py", *words.split()])
    with pytest.raises(SystemExit):
        hf_causal_lm.parse()
    assert says in capsys.readouterr().err


def test_too_short_a_text_is_said(tmp_path):
    def check():
        with pytest.raises(ValueError, match="has 5 tokens, and a sample has 32"):
            windows(byte_tokenizer(), str(text), 32)

    text = tmp_path / "short.txt"
    text.write_text("short")
    apart(check)
