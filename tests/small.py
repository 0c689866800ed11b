"""A small project for tests: a few of the facts, and a tiny language model with random weights in the real format."""
import csv
import shutil
from pathlib import Path

from histchrono.core.paths import root

SUBJECTS = ("United Kingdom", "France", "Germany", "Italy", "Japan", "Canada", "Chelsea F.C.", "Real Madrid CF", "Manchester United F.C.", "Liverpool F.C.", "Drammen", "Leipzig", "Dresden",
            "Emmanuel Macron", "Boris Johnson", "Keir Starmer", "Rishi Sunak", "Olaf Scholz", "Friedrich Merz", "Justin Trudeau", "Microsoft", "Delta Air Lines", "Lufthansa", "London", "Berlin")


def small_facts(out: Path):
    "Copy the facts about some subjects, and the entities they need."
    src = root() / "data" / "wikidata"
    read = lambda p: list(csv.reader(open(p, encoding="utf-8", newline=""), delimiter="\t", quoting=csv.QUOTE_NONE))
    head, *entities = read(src / "entities.tsv")
    by = {r[0]: r for r in entities}
    files = {p.name: read(p) for p in sorted(src.glob("facts_*.tsv"))}
    kept = {n: [rows[0]] + [r for r in rows[1:] if r[0] in SUBJECTS] for n, rows in files.items()}
    need = {x for rows in kept.values() for r in rows[1:] for x in (r[0], r[2])}
    while more := {by[n][i] for n in need for i in (4, 5) if by[n][i]} - need:
        need |= more
    out.mkdir(parents=True, exist_ok=True)
    dump = lambda name, rows: (out / name).write_text("".join("\t".join(r) + "\n" for r in rows), encoding="utf-8")
    dump("entities.tsv", [head] + [by[n] for n in sorted(need)])
    for n, rows in kept.items():
        dump(n, rows)
    return need


def tiny_model(folder: Path, seed: int = 0) -> Path:
    "Save a Llama of a few thousand random weights, with a byte tokenizer and a chat template, as a hub would hold it."
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    t = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tok = transformers.PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"])
    tok.chat_template = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(vocab_size=len(tok), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                                      max_position_embeddings=4096, bos_token_id=tok.bos_token_id, eos_token_id=tok.eos_token_id, initializer_range=0.3)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tok.save_pretrained(folder)
    return folder


def small_project(base: Path, chains: int = 24) -> Path:
    "A project of its own, with the real notebooks and the real graph."
    p = base / "project"
    for d in ("nbs/runs", "nbs/papers", "workflow", "data/reported", "data/histvis"):
        shutil.copytree(root() / d, p / d)
    small_facts(p / "data" / "wikidata")
    tiny_model(base / "tiny")
    ini = (root() / "settings.ini").read_text()
    ini = ini.replace("eval_chains = 400\nparaphrases = 120", f"eval_chains = {chains}\nparaphrases = {chains // 4}").replace("bootstrap = 2000", "bootstrap = 100")
    demo = "activities = 50\nimages_per_prompt = 2\n"
    assert demo in ini and "probe_heldout = 700" in ini
    ini = ini.replace(demo, "activities = 40\nimages_per_prompt = 1\nperiods = 17th 20th 1910s 1950s\nprobe_train = 24\nprobe_val = 8\n").replace("probe_heldout = 700", "probe_heldout = 20").replace("vsd_replicates = 5000", "vsd_replicates = 200")
    assert f"eval_chains = {chains}" in ini and "bootstrap = 100" in ini and ini.count("[weights]") == 1
    (p / "settings.ini").write_text(ini + f"SmolLM2-135M-Instruct = {base / 'tiny'}\n")
    return p
