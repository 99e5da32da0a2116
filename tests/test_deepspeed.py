"""DeepSpeed's JSON, as it is: every key has a fate, and none is passed over in silence."""

import base64
import json
import re

import pytest
from deepspeed_keys import AT_BF16, AT_FP16, AT_NVME, AT_STAGE_3, KEYS
from omegaconf import OmegaConf

from lightning_zero import ZeroStrategy
from lightning_zero.__main__ import main
from lightning_zero.config.deepspeed import table, translate
from lightning_zero.config.deepspeed.load import ENVIRONMENT
from lightning_zero.config.deepspeed.row import Fate
from lightning_zero.config.deepspeed.translate import ROWS


def nested(key, value):
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def merged(one, other):
    """Two configurations, block by block."""
    both = dict(one)
    for name, value in other.items():
        inner = both.get(name)
        both[name] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return both


def lines(text, prefix="", base=(), makes=()):
    """Each line beside a configuration ``base``, which makes settings of its own."""
    for line in text.strip().splitlines():
        given, _, outcome = line.partition(" -> ")
        key, value = given.split(" = ", 1)
        fate, *settings = outcome.split("; ")
        wanted = {name: json.loads(word) for name, word in (setting.split("=", 1) for setting in settings)}
        config = merged(dict(base), nested(prefix + key, json.loads(value)))
        yield pytest.param(prefix + key, config, fate, {**dict(makes), **wanted}, id=f"{prefix}{key}={value}"[:60])


FP16 = {"precision": "16-true", "loss_scale": {"loss_scale_window": 1000, "hysteresis": 2}}
CONSECUTIVE = "consecutive_hysteresis = true -> honoured"
BF16 = {"precision": "bf16-true", "nonfinite_gradients": "skip"}
ON_DISK = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/scratch"}}
TABLE = [
    *lines(KEYS),
    *lines(AT_STAGE_3, "zero_optimization.", {"zero_optimization": {"stage": 3}}, {"stage": 3}),
    *lines(AT_FP16, "fp16.", {"fp16": {"enabled": True}}, FP16),
    *lines(
        CONSECUTIVE,
        "fp16.",
        {"fp16": {"enabled": True}},
        {**FP16, "loss_scale": {**FP16["loss_scale"], "consecutive_hysteresis": True}},
    ),
    *lines(AT_BF16, "bf16.", {"bf16": {"enabled": True}}, BF16),
]
DISK = [*lines(AT_NVME, "", {"zero_optimization": ON_DISK})]


@pytest.mark.parametrize(("key", "config", "fate", "settings"), DISK)
def test_a_key_of_offload_to_a_disk(key, config, fate, settings):
    read = translate(config)
    (verdict,) = [each for each in read.verdicts if each.key == key]
    assert verdict.fate.value == fate, table(read)
    if fate != "refused":
        wanted = {"device": "nvme", "nvme_path": "/scratch", **settings}
        assert read.settings == {"stage": 2, "offload_optimizer": wanted}


def test_every_key_is_in_the_table_and_has_a_row():
    assert {case.values[0] for case in TABLE} == set(ROWS)


@pytest.mark.parametrize(("key", "config", "fate", "settings"), TABLE)
def test_a_key_has_its_fate_and_makes_its_settings(key, config, fate, settings):
    """Settings that a key must not make would show as a difference, too."""
    read = translate(config)
    (verdict,) = [each for each in read.verdicts if each.key == key and (each.value is not None or fate == "refused")]
    assert verdict.fate.value == fate, table(read)
    assert verdict.words or fate == "honoured"
    if fate == "refused":
        with pytest.raises(ValueError, match=re.escape(key)):
            ZeroStrategy(config=config)
        return
    made = settings
    shown = {name: list(value) if isinstance(value, tuple) else value for name, value in read.settings.items()}
    assert shown == made
    ZeroStrategy(config=config)


@pytest.mark.parametrize("key", sorted(ROWS))
def test_a_misspelt_key_is_never_taken_in_silence(key):
    """A letter too much in each name of the path, wherever that makes a name that does not exist."""
    names = key.split(".")
    for place in range(len(names)):
        wrong = names.copy()
        wrong[place] += "x"
        read = translate(nested(".".join(wrong), 1))
        where = ".".join(wrong[: place + 1])
        if any(known.startswith(where) for known in ROWS):
            continue
        (verdict,) = [each for each in read.verdicts if each.key == where]
        assert verdict.fate in (Fate.REFUSED, Fate.UNKNOWN) and names[place] in verdict.words


def test_an_unknown_key_of_the_root_is_named(caplog):
    read = translate({"my_notes": "x", "zero_optimization": {"stage": 2}})
    assert [verdict.key for verdict in read.unknown] == ["my_notes"] and not read.refused
    assert "my_notes" in table(read) and "left out" in table(read)


def test_what_is_off_is_accepted_whatever_it_is():
    for key, row in ROWS.items():
        if row.fate is Fate.REFUSED:
            values = [None, *([{"enabled": False}, {"enabled": False, "more": 1}, {}] if row.opaque else row.off)]
            for value in values:
                assert not translate(nested(key, value)).refused, (key, value)


def test_all_that_is_wrong_is_said_at_once():
    wrong = {"amp": {"enabled": True}, "zero_optimization": {"stag": 2, "zero_quantized_weights": True}}
    with pytest.raises(ValueError) as error:
        ZeroStrategy(config=wrong)
    assert all(part in str(error.value) for part in ("amp", "Did you mean 'stage'", "zero_quantized_weights"))


JSONC = """{
  // the stage
  "zero_optimization": {"stage": 2, /* all of
  it */ "overlap_comm": true,},  # a comma too many
  "wandb": {"project": "a//b#c\\"/*"},
}
"""


def test_comments_and_spare_commas_are_no_error(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(JSONC)
    read = translate(path)
    assert read.settings == {"stage": 2}
    assert [each.value for each in read.verdicts if each.key == "wandb.project"] == ['a//b#c"/*']


def test_a_configuration_comes_by_path_mapping_base64_and_environment(tmp_path, monkeypatch):
    config = {"zero_optimization": {"stage": 2}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    encoded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    for given in (config, path, str(path), encoded):
        assert ZeroStrategy(config=given).config.stage == 2
    monkeypatch.setenv(ENVIRONMENT, str(path))
    assert ZeroStrategy().config.stage == 2
    with pytest.raises(ValueError, match=r"stage=1 of ZeroStrategy and 2 of .*ds\.json differ"):
        ZeroStrategy(stage=1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1, "zero_optimization": {"stage": 2, "stage": 3}}', "the key 'stage' comes twice"),
        ('{"zero_optimization": {"stage": 2}', "line 1, column 35"),
        ("[1]", "must be an object"),
        ("{\n  'stage': 1}", "line 2, column 3"),
    ],
)
def test_a_file_that_is_no_configuration_says_where(tmp_path, text, says):
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ValueError, match=re.escape(says)):
        ZeroStrategy(config=tmp_path / "ds.json")


def test_a_file_that_is_not_there():
    with pytest.raises(FileNotFoundError, match="no DeepSpeed configuration 'nowhere.json'"):
        ZeroStrategy(config="nowhere.json")


def test_the_command_prints_the_table_and_the_batch_sizes(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 32, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}}')
    main(["config", str(path), "--ranks", "4"])
    printed = capsys.readouterr().out
    assert "zero_optimization.stage" in printed and "honoured" in printed
    assert printed.splitlines()[-2].startswith("ZeroStrategy(stage=2, train_batch_size=32")
    assert "32 samples a step = 2 in a batch * 4 batches * 4 ranks" in printed.splitlines()[-1]
    with pytest.raises(SystemExit, match="train_batch_size=32, gradient_accumulation_steps=4 and 3 ranks contradict"):
        main(["config", str(path), "--ranks", "3"])
    path.write_text('{"nebula": {"enabled": true}}')
    with pytest.raises(SystemExit, match="nebula"):
        main(["config", str(path)])
    assert "refused" in capsys.readouterr().out


ROUND_TRIPS = [
    {},
    {"stage": 1, "train_batch_size": 32, "micro_batch_size": 4, "gradient_clipping": 0.0},
    {"stage": 2, "precision": "bf16-true", "master_dtype": "bf16", "gradient_dtype": "bf16", "reduce_at": "window"},
    {"precision": "16-true", "loss_scale": {"hysteresis": 2, "min_loss_scale": 0.5}, "nonfinite_gradients": "raise"},
    {"precision": "16-mixed", "loss_scale": {"loss_scale": 128.0}, "leaf_classes": ["Mixture"]},
    {"precision": "bf16-mixed", "unit_classes": ["Block"], "prefetch": 0, "tile_size": 64, "max_unit_bytes": 2**25},
    {"precision": "64-true", "persistence_threshold": 10, "persistence_limit": 100, "broadcast_buffers": False},
    {"offload_optimizer": {"device": "cpu", "ratio": 0.5, "pin_memory": False}, "monitor": True},
    {
        "offload_optimizer": {"device": "nvme", "nvme_path": "/a", "threads": 2, "buffer_count": 7},
        "offload_params": {"device": "nvme", "nvme_path": "/b", "block_size": 8192},
    },
    {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    },
]


@pytest.mark.parametrize("settings", ROUND_TRIPS, ids=lambda settings: ",".join(settings) or "defaults")
def test_settings_survive_the_way_to_deepspeed_and_back(settings):
    before = ZeroStrategy(**settings)
    written = json.loads(json.dumps(before.to_deepspeed()))
    after = ZeroStrategy(config=written)
    assert after.config == before.config
    assert after.training == before.training


def test_what_json_has_no_words_for_is_not_written():
    with pytest.raises(ValueError, match="optimizer=.*cannot be written into a JSON file"):
        ZeroStrategy(optimizer=lambda params: None).to_deepspeed()


# What several keys say together


def fate_of(config, key):
    (verdict,) = [each for each in translate(config).verdicts if each.key == key]
    return verdict.fate.value, verdict.words


def test_what_is_said_of_a_precision_that_is_off_changes_nothing():
    config = {"bf16": {"enabled": True}, "fp16": {"enabled": False, "fp16_master_weights_and_grads": True}}
    assert fate_of(config, "fp16.fp16_master_weights_and_grads") == ("no effect", "fp16 is off")
    assert ZeroStrategy(config=config).config.master_dtype is None


def test_overflows_are_left_out_in_bf16_as_in_deepspeed():
    assert fate_of({"bf16": {"enabled": True}}, "bf16.check_grad_overflow")[0] == "honoured"
    assert ZeroStrategy(config={"bf16": {"enabled": True}}).config.nonfinite_gradients == "skip"


def test_a_file_without_a_stage_leaves_it_to_the_keyword():
    assert ZeroStrategy(stage=2, config={"train_batch_size": 32}).config.stage == 2
    assert ZeroStrategy(stage=3, config={"zero_optimization": {"offload_param": {"device": "cpu"}}}).config.stage == 3
    assert ZeroStrategy(config={"train_batch_size": 32}).config.stage == 0
    assert fate_of({"train_batch_size": 32}, "zero_optimization.stage") == (
        "honoured",
        "0, DeepSpeed's default: nothing is sharded",
    )


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"aio": {"intra_op_parallelism": 2, "thread_count": 4}}, "aio.thread_count"),
        (
            {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0, "prefetch_bucket_size": 5}},
            "zero_optimization.prefetch_bucket_size",
        ),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "none"}}},
            "zero_optimization.cpu_offload",
        ),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": False}}, "bfloat16"),
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage"),
        ({"prescale_gradients": True, "data_types": {"grad_accum_dtype": "fp16"}}, "prescale_gradients"),
        ({"train_batch_size": float("inf")}, "train_batch_size"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage"),
        ({"communication_data_type": ["fp32"]}, "communication_data_type"),
    ],
)
def test_contradictions_within_a_file_are_refused(config, key):
    assert fate_of(config, key)[0] == "refused"
    with pytest.raises(ValueError, match=re.escape(key)):
        ZeroStrategy(config=config)


def test_our_own_block_goes_before_and_that_is_said():
    config = {"zero_optimization": {"stage": 2}, "lightning_zero": {"stage": 3, "prefetch": 2}}
    assert fate_of(config, "zero_optimization.stage") == ("no effect", "lightning_zero.stage goes before")
    assert ZeroStrategy(config=config).config.stage == 3


def test_a_long_configuration_comes_in_base64():
    config = {"zero_optimization": {"stage": 2}, "wandb": {"project": "x" * 3000}}
    encoded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    assert ZeroStrategy(config=encoded).config.stage == 2


def test_keys_to_other_services_are_not_shown():
    assert "hush" not in table(translate({"comet": {"api_key": "hush"}}))


def test_a_file_may_begin_with_a_mark_and_lists_may_be_omegaconfs(tmp_path):
    path = tmp_path / "ds.json"
    path.write_bytes(b'\xef\xbb\xbf{"zero_optimization": {"stage": 2}}')
    assert ZeroStrategy(config=path).config.stage == 2
    config = OmegaConf.create({"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["a.Moe"]}}})
    assert ZeroStrategy(config=config).config.leaf_classes == ("Moe",)
