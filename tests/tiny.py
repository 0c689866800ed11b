"""Tiny checkpoints of ChronoScope's open models: each with random weights in its own architecture, its own kind of tokenizer
and a chat template of our own that behaves as the original's does, saved in the real format."""
from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

CORPUS = ["Answer with only the entity or value.", "Who was the president of France in 1998?", "Which party led the town in 2004?", "And its capital then?", "the answer is 17, the question was 9.2"] * 2
SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.3)

# Templates. A message is a turn; what differs is the control tokens, the system prompt's place, and what is printed unasked.
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
QWEN2 = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + CHATML
QWEN3 = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
         "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}")
LLAMA3 = ("{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\nDATE{{ m.content | trim }}<|eot_id|>{% endfor %}"
          "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}")
LLAMA31 = LLAMA3.replace('DATE', "{% if m.role == 'system' %}Today Date: {{ date_string if date_string is defined else strftime_now('%d %b %Y') }}\n\n{% endif %}")
MISTRAL = ("{% set system = messages[0].content if messages[0].role == 'system' else '' %}{% set turns = messages[1:] if system else messages %}{{ bos_token }}"
           "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user, assistant') }}{% endif %}"
           "{% if m.role == 'user' %}[INST] {% if loop.last and system %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}")
GEMMA = ("{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% for m in messages %}"
         "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
         "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}")
DEEPSEEK3 = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% else %}{{ m.content }}{% endif %}{% endfor %}"
             "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}")
DEEPSEEK = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content }}\n\n{% elif m.role == 'assistant' %}Assistant: {{ m.content }}{{ eos_token }}{% else %}{{ m.content }}\n\n{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}Assistant:{% endif %}")
PHI3 = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
PHI4 = "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
NEMOTRON = ("<extra_id_0>System\n{% for m in messages %}{% if m.role == 'system' %}{{ m.content | trim }}\n{% endif %}{% endfor %}\n"
            "{% for m in messages %}{% if m.role != 'system' %}<extra_id_1>{{ 'User' if m.role == 'user' else 'Assistant' }}\n{{ m.content | trim }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}<extra_id_1>Assistant\n{% endif %}")


@dataclass(frozen=True)
class Kind:
    "What one tiny checkpoint is made of and what must be seen of it."
    architecture: str  # without ForCausalLM
    vocabulary: str  # 'bytes' (byte-level BPE) or 'pieces' (sentencepiece's way: a sign for a space, bytes for what is unknown)
    template: str | None
    special: tuple[str, ...]  # control tokens, the end token first, the begin token second ('' = none)
    ends: tuple[str, ...]  # what generation_config.json declares as end tokens
    begins: int | None = 1  # begin tokens in a prompt; None: the begin token also opens every message
    folded: bool = False  # whether the system prompt has to be folded into the first question
    pad: str = ''  # '' = the tokenizer declares none
    adds_begin: bool = True  # whether the tokenizer adds the begin token to a plain text
    hub_class: str = 'PreTrainedTokenizerFast'  # tokenizer_class in the original's tokenizer_config.json
    seed: int = 0  # of the weights: one with which answers differ and some of them end
    config: dict = field(default_factory=dict)


_LLAMA3 = dict(architecture='Llama', vocabulary='bytes', special=('<|eot_id|>', '<|begin_of_text|>', '<|end_of_text|>', '<|eom_id|>', '<|start_header_id|>', '<|end_header_id|>'))
KINDS = {
    'SmolLM2-135M-Instruct': Kind('Llama', 'bytes', CHATML, ('<|im_end|>', '<|im_start|>', '<|endoftext|>'), ('<|im_end|>',), begins=None, pad='<|im_end|>', adds_begin=False, hub_class='GPT2Tokenizer', seed=7, config=dict(tie_word_embeddings=True)),
    'Qwen2.5-7B-Instruct': Kind('Qwen2', 'bytes', QWEN2, ('<|im_end|>', '', '<|endoftext|>', '<|im_start|>'), ('<|im_end|>', '<|endoftext|>'), begins=0, pad='<|endoftext|>', adds_begin=False, hub_class='Qwen2Tokenizer', seed=1),
    'Qwen3-4B': Kind('Qwen3', 'bytes', QWEN3, ('<|im_end|>', '', '<|endoftext|>', '<|im_start|>'), ('<|im_end|>', '<|endoftext|>'), begins=0, pad='<|endoftext|>', adds_begin=False, hub_class='Qwen2Tokenizer', seed=5, config=dict(head_dim=16, tie_word_embeddings=True)),
    'Llama-3.1-8B-Instruct': Kind(template=LLAMA31, ends=('<|end_of_text|>', '<|eom_id|>', '<|eot_id|>'), seed=5, **_LLAMA3, config=dict(rope_parameters=dict(rope_type='llama3', rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=256))),
    'Llama-3-8B-Instruct': Kind(template=LLAMA3.replace('DATE', ''), ends=('<|end_of_text|>', '<|eot_id|>'), seed=5, **_LLAMA3),
    'Llama-3-70B-Instruct': Kind(template=LLAMA3.replace('DATE', ''), ends=('<|end_of_text|>', '<|eot_id|>'), seed=2, **_LLAMA3, config=dict(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=1)),
    'Mistral-7B-Instruct': Kind('Mistral', 'pieces', MISTRAL, ('</s>', '<s>', '<unk>', '[INST]', '[/INST]'), ('</s>',), hub_class='LlamaTokenizer', seed=2, config=dict(head_dim=8, sliding_window=None)),
    'Gemma-7B-it': Kind('Gemma', 'pieces', GEMMA, ('<eos>', '<bos>', '<pad>', '<unk>', '<start_of_turn>', '<end_of_turn>'), ('<eos>',), folded=True, pad='<pad>', hub_class='GemmaTokenizer', config=dict(num_key_value_heads=4, head_dim=16, tie_word_embeddings=True)),
    'DeepSeek-V3': Kind('DeepseekV3', 'bytes', DEEPSEEK3, ('<｜end▁of▁sentence｜>', '<｜begin▁of▁sentence｜>', '<｜User｜>', '<｜Assistant｜>'), ('<｜end▁of▁sentence｜>',), pad='<｜end▁of▁sentence｜>', hub_class='LlamaTokenizerFast', seed=1,
                        config=dict(num_key_value_heads=4, moe_intermediate_size=16, n_shared_experts=1, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=12, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, num_mtp_layers=0)),
    'deepseek-llm-7b-chat': Kind('Llama', 'bytes', DEEPSEEK, ('<｜end▁of▁sentence｜>', '<｜begin▁of▁sentence｜>'), ('<｜end▁of▁sentence｜>',), pad='<｜end▁of▁sentence｜>', hub_class='LlamaTokenizerFast', seed=1, config=dict(num_key_value_heads=4)),
    'Phi-3': Kind('Phi3', 'pieces', PHI3, ('<|endoftext|>', '<s>', '</s>', '<unk>', '<|assistant|>', '<|system|>', '<|user|>', '<|end|>'), ('<|endoftext|>', '<|assistant|>', '<|end|>'), begins=0, pad='<|endoftext|>', adds_begin=False, hub_class='LlamaTokenizer', seed=7, config=dict(num_key_value_heads=4, sliding_window=47)),
    'Phi-4': Kind('Phi3', 'bytes', PHI4, ('<|im_end|>', '<|endoftext|>', '<|dummy|>', '<|im_start|>', '<|im_sep|>'), ('<|im_end|>',), begins=0, pad='<|dummy|>', adds_begin=False, hub_class='GPT2Tokenizer', config=dict(sliding_window=None)),
    'Nemotron-Mini-4B-Instruct': Kind('Nemotron', 'pieces', NEMOTRON, ('</s>', '<s>', '<unk>', '<extra_id_0>', '<extra_id_1>'), ('</s>',), begins=0, adds_begin=False, config=dict(head_dim=8, partial_rotary_factor=0.5)),
    'Gemma-3-270M': Kind('Gemma3', 'pieces', None, ('<eos>', '<bos>', '<pad>', '<unk>'), ('<eos>',), pad='<pad>', hub_class='GemmaTokenizer', seed=4, config=dict(num_hidden_layers=3, num_key_value_heads=1, head_dim=16, sliding_window=24, layer_types=['sliding_attention', 'sliding_attention', 'full_attention'], query_pre_attn_scalar=16, tie_word_embeddings=True)),
}
LAYOUT = dict(Qwen2Tokenizer='qwen', GemmaTokenizer='gemma', LlamaTokenizer='llama')  # classes that rebuild their pre-tokenizer when they are loaded


def tokenizer(kind: Kind):
    "A trained BPE of a few hundred pieces with the control tokens of the original."
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast
    end, begin, *_ = kind.special
    if kind.vocabulary == 'bytes':
        t = Tokenizer(models.BPE())
        words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), 'isolated'), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        t.decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
    else:
        t = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token='<unk>'))
        gemma = kind.hub_class == 'GemmaTokenizer'
        if gemma: t.normalizer, t.pre_tokenizer = normalizers.Replace(' ', '▁'), pre_tokenizers.Split(' ', 'merged_with_previous')
        else: t.pre_tokenizer = pre_tokenizers.Metaspace('▁', 'first', split=False)
        t.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), *([] if gemma else [decoders.Strip(' ', 1, 0)])])
        alphabet = sorted(set(''.join(CORPUS)) - {' '}) + ['▁']
    special = [s for s in kind.special if s]
    first = special + ([f'<0x{i:02X}>' for i in range(256)] if kind.vocabulary == 'pieces' else [])
    t.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=len(first) + len(alphabet) + 40, special_tokens=first, initial_alphabet=alphabet, show_progress=False))
    if kind.vocabulary == 'pieces':  # bytes are pieces, not control tokens
        raw = json.loads(t.to_str())
        raw['added_tokens'] = [a for a in raw['added_tokens'] if a['content'] in special]
        t = Tokenizer.from_str(json.dumps(raw))
    t.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    if kind.adds_begin: t.post_processor = processors.TemplateProcessing(single=f'{begin} $A', pair=f'{begin} $A {begin} $B', special_tokens=[(begin, t.token_to_id(begin))])
    names = dict(eos_token=end, **(dict(bos_token=begin) if begin else {}), **(dict(pad_token=kind.pad) if kind.pad else {}), **(dict(unk_token='<unk>') if '<unk>' in special else {}))
    tok = PreTrainedTokenizerFast(tokenizer_object=t, padding_side='right', clean_up_tokenization_spaces=False, additional_special_tokens=special[2 if begin else 1:], **names)
    tok.chat_template = kind.template
    return tok


def save(name: str, folder, seed: int | None = None, dtype: str = 'float32') -> Path:
    "Save the tiny checkpoint of a registry name as the hub would hold it."
    import torch
    import transformers
    kind, folder = KINDS[name], Path(folder)
    tok = tokenizer(kind)
    ids = tok.convert_tokens_to_ids
    ends = [ids(t) for t in kind.ends]
    torch.manual_seed(kind.seed if seed is None else seed)
    family = kind.architecture
    config = getattr(transformers, 'Gemma3TextConfig' if family == 'Gemma3' else f'{family}Config')(**{**SMALL, **kind.config}, vocab_size=len(tok) + 8, bos_token_id=tok.bos_token_id, eos_token_id=ends[0] if len(ends) == 1 else ends, pad_token_id=tok.pad_token_id)
    model = getattr(transformers, f'{family}ForCausalLM')(config).to(getattr(torch, dtype)).eval()
    with torch.no_grad():  # sharp attention, so that what is seen and where it stands matters; end tokens come up now and then; padding of the vocabulary is never said
        for n, w in model.named_parameters():
            if any(part in n for part in ('q_proj', 'k_proj', 'qkv_proj', 'o_proj', 'q_b_proj', 'kv_b_proj')):
                w *= 2
            if family == 'Gemma3' and any(part in n for part in ('q_norm', 'k_norm', 'post_attention_layernorm')):
                w += 1.5
        head = model.get_output_embeddings().weight
        head[ends] = torch.randn(len(ends), head.shape[1], dtype=head.dtype) * 3 * SMALL['initializer_range']
        head[len(tok):] = 0
    model.generation_config = transformers.GenerationConfig(eos_token_id=ends[0] if len(ends) == 1 else ends, bos_token_id=tok.bos_token_id, pad_token_id=tok.pad_token_id)
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    edit(folder / 'tokenizer_config.json', tokenizer_class=kind.hub_class)
    return folder


def edit(path, drop=(), **values):
    "Change a JSON file of a checkpoint."
    path = Path(path)
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**{k: v for k, v in old.items() if k not in drop}, **values}, indent=1))
