"""The flags of timm's training script, and which settings they stand for."""

from __future__ import annotations

import json
from dataclasses import dataclass

from inline_attention.engine.config.schema import SETTINGS
from inline_attention.support.settings import Setting


@dataclass(frozen=True)
class Flag:
    """A command line flag: its spellings, and the overrides it stands for, with {0}, {1}, … for its values."""

    names: tuple[str, ...]
    assignments: tuple[str, ...]
    bare: str | None = None  # the value it has if none follows it

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
        texts = [str(value) for value in values]
        if self.setting.is_text:  # as it is: in quotes, no part of it means anything
            texts = [
                text if text == "null" and self.setting.is_optional else json.dumps(text, ensure_ascii=False)
                for text in texts
            ]
        return [assignment.format(*texts) for assignment in self.assignments]


# Flags by section. --drop-path sets drop_path; others name their setting after "=". -j is another name for --workers.
FLAG_NAMES = {
    "run": "--output --experiment --resume --start-anew --device",
    "model": "--model=name --num-classes --img-size --in-chans --drop-path --initial-checkpoint",
    "data": "--data-dir=dir --dataset --train-split --val-split --class-map --repair --allow-outside-files "
    "--workers,-j --crop-pct",
    "augmentation": "--scale --ratio --hflip --vflip --aa=auto_augment --color-jitter --reprob --remode --recount "
    "--mixup --cutmix --mixup-prob --mixup-switch-prob --mixup-mode --mixup-off-epoch",
    "optimizer": "--opt=name --lr --lr-base=lr --lr-base-size --weight-decay --momentum --opt-betas=betas "
    "--opt-eps=eps --layer-decay",
    "schedule": "--sched=name --warmup-epochs --warmup-lr --min-lr --cooldown-epochs --decay-epochs --decay-rate",
    "loss": "--smoothing",
    "ema": "--model-ema=enabled --model-ema-decay=decay --model-ema-warmup=warmup",
    "training": "--epochs --updates --batch-size,-b --validation-batch-size,-vb --grad-accum-steps,--grad-accum "
    "--val-interval=validation_interval --amp --torchcompile,--compile=compile --torchcompile-mode=compile_mode "
    "--grad-checkpointing --clip-grad --seed",
    "checkpoints": "--checkpoint-hist=keep_last --eval-metric=metric",
    "logging": "--log-interval=interval --log-wandb=wandb --wandb-project",
}
# As in timm, these mean what they say: a recipe's scaling rules do not apply to them, and its other length gives way.
FURTHER_ASSIGNMENTS = {
    "--lr": "optimizer.lr_base_size=null",
    "--model-ema-decay": "ema.decay_base_size=null",
    "--epochs": "training.updates=null",
    "--grad-accum-steps": "training.total_batch_size=null",
    "--torchcompile-mode": "training.compile=true",
}


def _flag(section: str, text: str) -> Flag:
    """Return the flag that an entry of `FLAG_NAMES` describes."""
    spellings, _, field = text.partition("=")
    names = tuple(spellings.split(","))
    setting = SETTINGS[f"{section}.{field or names[0][2:].replace('-', '_')}"]
    value = "true" if setting.annotation is bool else "[{0}, {1}]" if setting.is_pair else "{0}"
    further = [FURTHER_ASSIGNMENTS[names[0]]] if names[0] in FURTHER_ASSIGNMENTS else []
    return Flag(names, (f"{setting.path}={value}", *further), bare="auto" if names[0] == "--amp" else None)


FLAGS: tuple[Flag, ...] = (
    *(_flag(section, text) for section, texts in FLAG_NAMES.items() for text in texts.split()),
    Flag(("--input-size",), ("model.img_size=[{1}, {2}]", "model.in_chans={0}")),
    Flag(("--fsdp2",), ("distributed.strategy=fsdp2",)),
)
