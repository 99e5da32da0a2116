"""Train a causal LM of ``transformers`` with a DeepSpeed configuration, and save it for ``from_pretrained``.

    python examples/hf_causal_lm.py --deepspeed ds_config.json --output_dir out --devices 2
    python examples/hf_causal_lm.py --deepspeed ds_config.json --output_dir lora --model_name_or_path out --lora_rank 8
    torchrun --nproc-per-node 2 examples/hf_causal_lm.py --stage 3 --bf16 --output_dir out

Arguments have the names of Hugging Face's TrainingArguments. What is not given is left to the configuration; where
both say something, and differ, that is an error. "auto" in it is what the arguments say.

Without ``--model_name_or_path`` a small Llama with random weights learns bytes. At the end ``--output_dir`` holds the
model in fp32, or the adapter of ``--lora_rank``, and the tokenizer. It is loaded from there, and the exit code is 0 if
it generates the same tokens as the module that was trained.
"""

import os
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from hf_data import byte_tokenizer, windows
from lightning.pytorch import LightningModule, Trainer, seed_everything
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedTokenizerBase,
    get_linear_schedule_with_warmup,
)

from lightning_zero import ZeroStrategy


def said(words: str, default: Any = None) -> Any:
    """A field with help for the command line."""
    return field(default=default, metadata={"help": words})


@dataclass
class Arguments:
    """The command line."""

    output_dir: str = said("folder for model or adapter, and tokenizer", "hf_output")
    deepspeed: str | None = said("DeepSpeed's JSON")
    stage: int | None = said("of ZeRO, in the place of --deepspeed: 0, 1, 2 or 3 (3 where neither is given)")
    model_name_or_path: str | None = said("what from_pretrained loads; without it a small Llama with random weights")
    lora_rank: int = said("train an adapter of this rank; 0: train the model", 0)
    gradient_checkpointing: bool = said("compute activations again in the backward", False)
    train_file: str | None = said("UTF-8 text; without it Python's language reference")
    block_size: int = said("tokens of a sample", 128)
    per_device_train_batch_size: int | None = said("samples of a batch of one rank; 8 where the JSON says nothing")
    gradient_accumulation_steps: int | None = said("batches of a step")
    num_train_epochs: int = said("passes over the text", 1)
    max_steps: int = said("optimizer steps, in the place of --num_train_epochs if above 0", -1)
    learning_rate: float | None = said("of AdamW; 5e-5 where the JSON says nothing")
    weight_decay: float | None = said("of AdamW; 0 where the JSON says nothing")
    warmup_steps: int | None = said("steps in which the learning rate rises before it falls; 0 where nothing is said")
    max_grad_norm: float | None = said("gradients are clipped to this global norm")
    bf16: bool = said("forward and backward in bf16, weights and optimizer in fp32", False)
    fp16: bool = said("the same with fp16, and a loss scale", False)
    seed: int = said("of weights and of the order of samples", 42)
    devices: str = said("ranks on this machine", os.environ.get("LOCAL_WORLD_SIZE", "auto"))
    logging_steps: int = said("print the loss at every so many steps, and at the first one", 10)


class CausalLM(LightningModule):
    """A model of ``transformers`` in a LightningModule that knows nothing of ZeRO."""

    def __init__(
        self, arguments: Arguments, vocabulary: int, learning_rate: float, weight_decay: float, warmup_steps: int
    ) -> None:
        super().__init__()
        self.save_hyperparameters("learning_rate", "weight_decay", "warmup_steps")  # where "auto" is looked up
        self.arguments, self.vocabulary = arguments, vocabulary
        self.losses: list[Tensor] = []

    def configure_model(self) -> None:
        """Weights come from the folder, on every rank, or are random and made where ZeRO wants them."""
        path = self.arguments.model_name_or_path
        model = random_llama(self.vocabulary) if path is None else load(path)
        if self.arguments.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        if self.arguments.lora_rank:
            rank = self.arguments.lora_rank
            model = get_peft_model(
                model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
            )
        self.model = model.train()  # from_pretrained gives it in eval mode, which Lightning would keep

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW, with the schedule of Hugging Face's Trainer. What the JSON has of the two goes before."""
        wanted = self.hparams
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=wanted.learning_rate, weight_decay=wanted.weight_decay)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = get_linear_schedule_with_warmup(optimizer, wanted.warmup_steps, total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.losses.append(loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Print the mean loss of all samples of the step."""
        step, loss = self.trainer.global_step + 1, torch.stack(self.losses).mean()
        self.losses.clear()
        if step == 1 or step % self.arguments.logging_steps == 0:
            loss = self.trainer.strategy.reduce(loss, reduce_op="mean")
            rate = optimizer.param_groups[0]["lr"]
            self.print(f"step {step}: loss {loss:.4f}, learning rate {rate:.3g}", flush=True)


def random_llama(vocabulary: int) -> nn.Module:
    """A small one without values: the strategy fills in random ones, the same on all ranks."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def load(folder: str) -> nn.Module:
    """A model, or an adapter on its model, in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def main() -> None:
    """Train, save, and compare what was saved."""
    arguments = parse()
    strategy = make_strategy(arguments)
    seed_everything(arguments.seed, verbose=False)
    path = arguments.model_name_or_path
    tokenizer = byte_tokenizer() if path is None else AutoTokenizer.from_pretrained(path)
    module = CausalLM(
        arguments,
        len(tokenizer),
        learning_rate=5e-5 if arguments.learning_rate is None else arguments.learning_rate,
        weight_decay=arguments.weight_decay or 0.0,
        warmup_steps=arguments.warmup_steps or 0,
    )
    samples = windows(tokenizer, arguments.train_file, arguments.block_size)
    batch_size = arguments.per_device_train_batch_size or 8  # the strategy exchanges it for the JSON's
    trainer = Trainer(
        strategy=strategy,
        devices=arguments.devices,
        max_steps=arguments.max_steps,
        max_epochs=-1 if arguments.max_steps > 0 else arguments.num_train_epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(samples, batch_size, shuffle=True, drop_last=True))
    if trainer.is_global_zero:  # the module is whole again on every rank
        module.model.save_pretrained(arguments.output_dir)
        tokenizer.save_pretrained(arguments.output_dir)
        prompt = tokenizer.decode(samples[len(samples) // 2][: arguments.block_size // 2])
        compare(module.model, arguments.output_dir, prompt)


def parse() -> Arguments:
    """The command line, without misspelt or shortened names."""
    parser = HfArgumentParser(Arguments, allow_abbrev=False, description=__doc__.partition("\n")[0])
    arguments = Arguments(**vars(parser.parse_args()))
    if arguments.deepspeed is not None and arguments.stage is not None:
        parser.error("--stage: the JSON of --deepspeed says it")
    if arguments.lora_rank and arguments.model_name_or_path is None:
        parser.error("--lora_rank: an adapter needs weights, from --model_name_or_path")
    if arguments.bf16 and arguments.fp16:
        parser.error("--bf16 and --fp16: choose one of them")
    return arguments


def make_strategy(arguments: Arguments) -> ZeroStrategy:
    """What the configuration says, and what the command line says beside it."""
    strategy = ZeroStrategy(
        arguments.stage,
        config=arguments.deepspeed,
        micro_batch_size=arguments.per_device_train_batch_size,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        gradient_clipping=arguments.max_grad_norm,
        precision="bf16-true" if arguments.bf16 else "16-true" if arguments.fp16 else None,
    )
    check_optimizer(arguments, strategy)
    return strategy


def check_optimizer(arguments: Arguments, strategy: ZeroStrategy) -> None:
    """The JSON's optimizer takes the place of the module's: it must not say otherwise than the command line.

    Raises:
        ValueError: it does, or says nothing of what the command line says.
    """
    optimizer, scheduler = strategy.training.optimizer, strategy.training.scheduler
    for name, block, key in (
        ("learning_rate", optimizer, "lr"),
        ("weight_decay", optimizer, "weight_decay"),
        ("warmup_steps", scheduler or optimizer, "warmup_num_steps"),
    ):
        value = getattr(arguments, name)
        if block and value is not None and block["params"].get(key) not in ("auto", value):
            theirs = f"{key}={block['params'][key]}" if key in block["params"] else f"no {key}"
            raise ValueError(
                f"--{name} {value} and {block['type']} of {arguments.deepspeed}, which has {theirs}, contradict one "
                f'another. Say it once, or "auto" there.'
            )


def generate(model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompt: str) -> tuple[list[int], Tensor]:
    """The most likely tokens that follow the prompt, and the logits that they were chosen by."""
    inputs = tokenizer(prompt, return_tensors="pt")
    made = model.eval().generate(
        **inputs, max_new_tokens=40, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    return made.sequences[0, inputs["input_ids"].shape[1] :].tolist(), torch.stack(made.logits)


def compare(trained: nn.Module, folder: str, prompt: str) -> None:
    """Generate with the trained module and with what the folder holds; end with an error if they differ."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens, logits = generate(trained, tokenizer, prompt)
    loaded_tokens, loaded_logits = generate(load(folder), tokenizer, prompt)
    print(f"\nprompt: {prompt!r}\ntrained: {tokenizer.decode(tokens)!r}\nloaded: {tokenizer.decode(loaded_tokens)!r}")
    if loaded_tokens != tokens:
        sys.exit(f"What from_pretrained loads from {folder} generates other tokens than the trained module.")
    most = (loaded_logits - logits).abs().max()
    print(f"from_pretrained({folder!r}) generates the same {len(tokens)} tokens; logits differ by at most {most:.2g}.")


if __name__ == "__main__":
    main()
