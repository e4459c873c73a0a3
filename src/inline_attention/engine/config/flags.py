"""The flags of timm's training script, and which settings they stand for."""

from __future__ import annotations

from dataclasses import dataclass

from inline_attention.engine.config.schema import SETTINGS
from inline_attention.support.settings import Setting, quoted


@dataclass(frozen=True)
class Flag:
    """A command line flag.

    Attributes:
        names: Spellings, the usual one first.
        assignments: The overrides it stands for, with {0}, {1}, … for its values.
        bare: The value it has if none follows it; None if one must.
    """

    names: tuple[str, ...]
    assignments: tuple[str, ...]
    bare: str | None = None

    @property
    def setting(self) -> Setting:
        """The setting it is about; others that it touches make room for it."""
        return SETTINGS[self.assignments[0].partition("=")[0]]

    @property
    def num_values(self) -> int:
        """How many values follow it; 0 for a switch."""
        text = " ".join(self.assignments)
        return next(count for count in range(len(text)) if f"{{{count}}}" not in text)

    def overrides(self, *values: object) -> list[str]:
        """The overrides `key=value` that the flag with these values stands for."""
        if len(values) != self.num_values:
            raise ValueError(f"{self.names[0]} takes {self.num_values} values, got {len(values)}: {values}")
        texts = map(str, values)
        if self.setting.is_text:  # as it is: in quotes, no part of it means anything
            texts = (text if text == "null" and self.setting.is_optional else quoted(text) for text in texts)
        texts = list(texts)
        return [assignment.format(*texts) for assignment in self.assignments]


def _flag(*names_and_assignments: str, bare: str | None = None) -> Flag:
    names = tuple(text for text in names_and_assignments if text.startswith("-"))
    return Flag(names, names_and_assignments[len(names) :], bare)


# As in timm, --lr, --model-ema-decay and --grad-accum-steps mean what they say: no scaling rule of a recipe applies to
# them, and the number of images per update follows from the steps.
FLAGS: tuple[Flag, ...] = (
    _flag("--output", "run.output={0}"),
    _flag("--experiment", "run.experiment={0}"),
    _flag("--resume", "run.resume={0}"),
    _flag("--start-anew", "run.start_anew=true"),
    _flag("--device", "run.device={0}"),
    _flag("--model", "model.name={0}"),
    _flag("--num-classes", "model.num_classes={0}"),
    _flag("--img-size", "model.img_size={0}"),
    _flag("--in-chans", "model.in_chans={0}"),
    _flag("--input-size", "model.img_size=[{1}, {2}]", "model.in_chans={0}"),
    _flag("--drop-path", "model.drop_path={0}"),
    _flag("--initial-checkpoint", "model.initial_checkpoint={0}"),
    _flag("--data-dir", "data.dir={0}"),
    _flag("--dataset", "data.dataset={0}"),
    _flag("--train-split", "data.train_split={0}"),
    _flag("--val-split", "data.val_split={0}"),
    _flag("--class-map", "data.class_map={0}"),
    _flag("--repair", "data.repair=true"),
    _flag("--allow-outside-files", "data.allow_outside_files=true"),
    _flag("--workers", "-j", "data.workers={0}"),
    _flag("--crop-pct", "data.crop_pct={0}"),
    _flag("--scale", "augmentation.scale=[{0}, {1}]"),
    _flag("--ratio", "augmentation.ratio=[{0}, {1}]"),
    _flag("--hflip", "augmentation.hflip={0}"),
    _flag("--vflip", "augmentation.vflip={0}"),
    _flag("--aa", "augmentation.auto_augment={0}"),
    _flag("--color-jitter", "augmentation.color_jitter={0}"),
    _flag("--reprob", "augmentation.reprob={0}"),
    _flag("--remode", "augmentation.remode={0}"),
    _flag("--recount", "augmentation.recount={0}"),
    _flag("--mixup", "augmentation.mixup={0}"),
    _flag("--cutmix", "augmentation.cutmix={0}"),
    _flag("--mixup-prob", "augmentation.mixup_prob={0}"),
    _flag("--mixup-switch-prob", "augmentation.mixup_switch_prob={0}"),
    _flag("--mixup-mode", "augmentation.mixup_mode={0}"),
    _flag("--mixup-off-epoch", "augmentation.mixup_off_epoch={0}"),
    _flag("--opt", "optimizer.name={0}"),
    _flag("--lr", "optimizer.lr={0}", "optimizer.lr_base_size=null"),
    _flag("--lr-base", "optimizer.lr={0}"),
    _flag("--lr-base-size", "optimizer.lr_base_size={0}"),
    _flag("--weight-decay", "optimizer.weight_decay={0}"),
    _flag("--momentum", "optimizer.momentum={0}"),
    _flag("--opt-betas", "optimizer.betas=[{0}, {1}]"),
    _flag("--opt-eps", "optimizer.eps={0}"),
    _flag("--layer-decay", "optimizer.layer_decay={0}"),
    _flag("--sched", "schedule.name={0}"),
    _flag("--warmup-epochs", "schedule.warmup_epochs={0}"),
    _flag("--warmup-lr", "schedule.warmup_lr={0}"),
    _flag("--min-lr", "schedule.min_lr={0}"),
    _flag("--cooldown-epochs", "schedule.cooldown_epochs={0}"),
    _flag("--decay-epochs", "schedule.decay_epochs={0}"),
    _flag("--decay-rate", "schedule.decay_rate={0}"),
    _flag("--smoothing", "loss.smoothing={0}"),
    _flag("--model-ema", "ema.enabled=true"),
    _flag("--model-ema-decay", "ema.decay={0}", "ema.decay_base_size=null"),
    _flag("--model-ema-warmup", "ema.warmup=true"),
    _flag("--epochs", "training.epochs={0}", "training.updates=null"),
    _flag("--updates", "training.updates={0}"),
    _flag("--batch-size", "-b", "training.batch_size={0}"),
    _flag("--validation-batch-size", "-vb", "training.validation_batch_size={0}"),
    _flag("--grad-accum-steps", "--grad-accum", "training.grad_accum_steps={0}", "training.total_batch_size=null"),
    _flag("--val-interval", "training.validation_interval={0}"),
    _flag("--amp", "training.amp={0}", bare="auto"),
    _flag("--torchcompile", "--compile", "training.compile=true"),
    _flag("--torchcompile-mode", "training.compile_mode={0}", "training.compile=true"),
    _flag("--grad-checkpointing", "training.grad_checkpointing=true"),
    _flag("--clip-grad", "training.clip_grad={0}"),
    _flag("--seed", "training.seed={0}"),
    _flag("--checkpoint-hist", "checkpoints.keep_last={0}"),
    _flag("--eval-metric", "checkpoints.metric={0}"),
    _flag("--log-interval", "logging.interval={0}"),
    _flag("--log-wandb", "logging.wandb=true"),
    _flag("--wandb-project", "logging.wandb_project={0}"),
    _flag("--fsdp2", "distributed.strategy=fsdp2"),
)
