"""Train a causal language model of `transformers` with a DeepSpeed JSON and Hugging Face's names of arguments.

    python examples/hf_causal_lm.py --deepspeed ds_config.json
    python examples/hf_causal_lm.py --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --bf16
    python examples/hf_causal_lm.py --model_name_or_path FOLDER --train_file TEXT --deepspeed ds.json --lora_rank 8

Without a model it trains a tiny Llama of random weights on bytes, without a file on the Python language reference. It
ends with a folder that `from_pretrained` loads, and compares what the loaded model and the trained one write.
"""

import logging
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from text import language_reference
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, LlamaConfig, PreTrainedModel

from lightning_zero import ZeroStrategy

TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
PROMPT, NEW_TOKENS = "The value of ", 24


@dataclass
class Arguments:
    """What is not given is said by the DeepSpeed JSON, or is the default of the Trainer."""

    model_name_or_path: str | None = None
    train_file: str | None = None
    output_dir: str = "outputs/hf_causal_lm"
    deepspeed: str | None = None
    per_device_train_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    max_grad_norm: float | None = None
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    max_steps: int = 20
    bf16: bool = False
    fp16: bool = False
    gradient_checkpointing: bool = False
    lora_rank: int = 0
    block_size: int = 64
    devices: int = 2
    seed: int = 0


class CausalLM(LightningModule):
    """A model of `transformers`, as it is."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        # where "auto" of a DeepSpeed JSON looks
        self.save_hyperparameters({"learning_rate": args.learning_rate, "weight_decay": args.weight_decay})
        self.model = load(args)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.AdamW(trained, lr=self.hparams.learning_rate, weight_decay=self.hparams.weight_decay)


def load(args: Arguments) -> Any:
    """The model, with LoRA's adapters if there are to be any."""
    if args.model_name_or_path is None:
        config = LlamaConfig(**TINY, num_attention_heads=4, bos_token_id=None, eos_token_id=None)
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=torch.float32)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if args.lora_rank:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=args.lora_rank, lora_alpha=args.lora_rank, task_type="CAUSAL_LM"))
    return model


class Bytes:
    """Text as bytes, where the model has no tokenizer."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def save_pretrained(self, folder: str) -> None:
        """There is nothing to be saved."""


def load_tokenizer(name: str | None) -> Any:
    """That of the model, if it has one."""
    folder = Path(name or ".")
    if name is None or (folder.is_dir() and not any(folder.glob("tokenizer*"))):
        return Bytes()
    return AutoTokenizer.from_pretrained(name)


def loader(args: Arguments, tokenizer: Any) -> DataLoader[Tensor]:
    """The text in blocks of tokens. A DeepSpeed JSON may want another batch size: then the strategy sees to that."""
    text = Path(args.train_file).read_text() if args.train_file else language_reference().decode()
    tokens = torch.tensor(tokenizer.encode(text))
    blocks = tokens[: len(tokens) // args.block_size * args.block_size].view(-1, args.block_size)
    return DataLoader(blocks, batch_size=args.per_device_train_batch_size or 8, shuffle=True, drop_last=True)


def make_trainer(args: Arguments) -> Trainer:
    """Arguments that are given go to the strategy, which compares them with the DeepSpeed JSON."""
    settings = {
        "micro_batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_clipping": args.max_grad_norm,
    }
    return Trainer(
        strategy=ZeroStrategy(config=args.deepspeed, **settings),
        devices=args.devices,
        precision="bf16-mixed" if args.bf16 else "16-mixed" if args.fp16 else None,
        max_epochs=-1,
        max_steps=args.max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )


def save(model: Any, tokenizer: Any, folder: str) -> PreTrainedModel:
    """Write what `from_pretrained` loads; adapters go into their weights, and into a folder of their own."""
    if hasattr(model, "merge_and_unload"):
        model.save_pretrained(f"{folder}/adapter")
        model = model.merge_and_unload()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def write(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """What a model goes on with after a prompt, drawn with the same random numbers each time."""
    torch.manual_seed(0)
    tokens = torch.tensor([prompt])
    output = model.eval().generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW_TOKENS, do_sample=True, pad_token_id=0
    )
    return output[0].tolist()


def main(args: Arguments) -> None:
    """Train, save, load, compare."""
    warnings.filterwarnings("ignore", ".*(does not have many workers|treespec)")
    logging.getLogger("lightning.fabric").setLevel(logging.INFO)
    seed_everything(args.seed, verbose=False)
    tokenizer = load_tokenizer(args.model_name_or_path)
    module, trainer = CausalLM(args), make_trainer(args)
    trainer.fit(module, loader(args, tokenizer))
    if not trainer.is_global_zero:
        return
    # after a fit the module is whole again, on every rank
    trained = save(module.model, tokenizer, args.output_dir)
    loaded = AutoModelForCausalLM.from_pretrained(args.output_dir, dtype=torch.float32)
    written = [write(model.cpu(), tokenizer.encode(PROMPT)) for model in (trained, loaded)]
    print(f"\nloss {module.losses[0]:.3f} at first, {module.losses[-1]:.3f} after {trainer.global_step} steps")
    print(f"trained: {tokenizer.decode(written[0])!r}\nloaded:  {tokenizer.decode(written[1])!r}")
    print(f"{args.output_dir}: {'the same tokens' if written[0] == written[1] else 'OTHER TOKENS'}")
    if written[0] != written[1]:
        sys.exit(1)


if __name__ == "__main__":
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    main(arguments)
