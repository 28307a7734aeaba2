"""What tests of placement rules share: a list of rules as the text of a published file, and which rule takes which
module of a torch model, walked in Python."""
import json
import re


def text_of(rules):
    """As published files are laid out."""
    lines = []
    for rule in rules:
        lines.append("- match:")
        for key, value in rule["match"].items():
            lines.append(f"    {key}: {json.dumps(value) + '  # regular expression' if key == 'name' else value}")
        lines += ["  replace:", f"    class: {rule['replace']['class']}"]
        if "kwargs" in rule["replace"]:
            lines.append("    kwargs:")
            for key, value in rule["replace"]["kwargs"].items():
                if isinstance(value, dict):
                    lines += [f"      {key}:"] + [f"        {layer}: {json.dumps(device)}"
                                                  for layer, device in value.items()]
                else:
                    lines.append(f"      {key}: {json.dumps(value)}")
        if "recursive" in rule:
            lines.append("  recursive: False # don't recursively inject submodules of this module")
        lines.append("")
    return "\n".join(lines)


# What older modeling files call the classes of transformers 5 (spec/rules.md, A8).
ALIASES = {"DeepseekV2MoE": {"DeepseekV2Moe"}, "DeepseekV2YarnRotaryEmbedding": {"DeepseekV2RotaryEmbedding"},
           "MoEGate": {"DeepseekV2TopkRouter", "DeepseekV3TopkRouter"},
           "Qwen2MoeRotaryEmbedding": {"Qwen3MoeRotaryEmbedding"}}


def spelled(name, pattern):
    """The name as the pattern has it, where that is older or newer."""
    block = next((word for word in ("block_sparse_moe", "feed_forward") if word in pattern), "mlp")
    return name.replace(".mlp", "." + block, 1)


def walk(module, name, rules, out):
    """First match, depth first; {name: number of the rule}."""
    words = {kind.__name__ for kind in type(module).__mro__}
    number = None
    for i, rule in enumerate(rules):
        match = rule["match"]
        wanted = match.get("class", "").rpartition(".")[2]
        if wanted and not words & ({wanted} | ALIASES.get(wanted, set())):
            continue
        if "name" in match and not re.search(match["name"], spelled(name, match["name"])):
            continue
        number = i
        break
    out[name] = number
    if number is None or rules[number].get("recursive", True):
        for child, below in module.named_children():
            walk(below, f"{name}.{child}" if name else child, rules, out)
