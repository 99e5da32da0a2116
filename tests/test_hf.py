"""The Hugging Face example, as its users run it."""

import json

import pytest
from test_configured import ZERO2, ZERO3
from test_examples import run
from transformers import AutoModelForCausalLM

AUTO = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 2, "total_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def train(folder, config, *more):
    """What is printed, the exit code, and the losses of the first and the last batch."""
    (folder / "ds.json").write_text(config)
    words = ["--deepspeed", "ds.json", "--output_dir", "out", "--max_steps", "6", *more]
    output, code = run("hf_causal_lm.py", *words, cwd=folder)
    losses = [line.split() for line in output.splitlines() if line.startswith("loss ")]
    return output, code, [float(losses[0][1]), float(losses[0][4])] if losses else None


@pytest.mark.parametrize("config", [ZERO2, pytest.param(ZERO3, marks=pytest.mark.full)], ids=["zero2", "zero3"])
def test_a_founding_configuration_ends_in_a_folder_that_is_loaded(tmp_path, config):
    output, code, losses = train(tmp_path, config)
    assert code == 0 and "out: the same tokens" in output, output
    assert losses[1] < losses[0] - 0.3
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.hidden_size == 64
    assert "what becomes of it" in output


def test_a_configuration_full_of_auto_and_adapters_on_weights_from_a_folder(tmp_path):
    model = AutoModelForCausalLM.from_config(_tiny())
    model.save_pretrained(tmp_path / "base")
    before = model.model.embed_tokens.weight
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy. " * 400)
    more = ["--model_name_or_path", "base", "--train_file", "text.txt", "--lora_rank", "4", "--bf16"]
    more += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--learning_rate", "0.05"]
    output, code, losses = train(tmp_path, json.dumps(AUTO), *more, "--gradient_checkpointing", "true")
    assert code == 0 and "out: the same tokens" in output, output
    assert losses[1] < losses[0] - 0.1
    assert (tmp_path / "out" / "adapter" / "adapter_config.json").is_file()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").model
    assert after.embed_tokens.weight.equal(before)  # frozen: not a bit has changed
    assert not after.layers[0].self_attn.q_proj.weight.equal(model.model.layers[0].self_attn.q_proj.weight)


def test_a_contradiction_between_arguments_and_configuration_is_said(tmp_path):
    output, code, _ = train(tmp_path, ZERO2, "--gradient_accumulation_steps", "2")
    assert code != 0
    assert "gradient_accumulation_steps=2 of ZeroStrategy and 4 of ds.json differ. Say it once." in output


def _tiny():
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(vocab_size=256, bos_token_id=None, eos_token_id=None, **sizes)
