"""Count parameters and multiply-adds of all models for `inline models`: run it after changing a model."""

import json

from inline_attention import list_models
from inline_attention.benchmark.model_size import STORED_SIZES, measure_model_size


def main() -> None:
    sizes = {name: measure_model_size(name) for name in list_models()}
    entries = [
        f"  {json.dumps(name)}: {json.dumps([size.parameters, size.macs, size.input_size[1]])}"
        for name, size in sizes.items()
    ]
    STORED_SIZES.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")
    print(STORED_SIZES)


if __name__ == "__main__":
    main()
