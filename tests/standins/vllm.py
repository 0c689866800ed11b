"""A stand-in for vLLM, for tests only: the calls of vLLM 0.33 with strict signatures, answered by transformers on a CPU.

It returns results out of order. STANDIN_LOG names a file that gets a line a prompt (GPU, process, first ids, cached);
STANDIN_DROP leaves the last prompt of the first call out; STANDIN_DIE names a file: the process of the GPU that it names ends at its next call."""
import os

__version__ = "stand-in"


class SamplingParams:
    def __init__(self, *, n, presence_penalty, frequency_penalty, repetition_penalty, temperature, top_p, top_k, min_p, stop_token_ids, max_tokens, detokenize, seed=None):
        if (n, presence_penalty, frequency_penalty, repetition_penalty, temperature, top_p, min_p, detokenize, seed) != (1, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, False, None) or top_k not in (0, -1):
            raise ValueError("not greedy")
        self.stop, self.max = stop_token_ids, max_tokens


class Bag:
    def __init__(self, **kw):
        self.__dict__.update(kw)


class LLM:
    def __init__(self, *, model, tokenizer, dtype, max_model_len, load_format, trust_remote_code, generation_config, enable_prefix_caching, tensor_parallel_size, seed, disable_log_stats):
        if (tokenizer, generation_config, enable_prefix_caching, trust_remote_code, load_format, tensor_parallel_size) != (model, "vllm", True, False, "safetensors", 1):
            raise ValueError("not what the engine is to ask for")
        if os.environ.get("STANDIN_BROKEN"):
            raise RuntimeError("no kernel image is available\nmore lines")
        import torch
        import transformers

        torch.set_num_threads(1)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self.room, self.seen, self.calls = max_model_len, set(), 0

    def generate(self, prompts, sampling_params, *, use_tqdm):
        import torch
        import transformers

        gpu = os.environ.get("CUDA_VISIBLE_DEVICES")
        die = os.environ.get("STANDIN_DIE")
        if die and os.path.exists(die) and open(die).read() == gpu:
            os._exit(1)
        self.calls += 1
        out = []
        for i, (p, s) in enumerate(zip(prompts, sampling_params, strict=True)):
            ids = p["prompt_token_ids"]
            if set(p) != {"prompt_token_ids"} or not all(type(x) is int for x in ids) or len(ids) + s.max > self.room:
                raise ValueError("a prompt that does not fit")
            how = transformers.GenerationConfig(do_sample=False, max_new_tokens=s.max, eos_token_id=s.stop, pad_token_id=0)
            self.model.generation_config = how
            new = self.model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), generation_config=how)[0, len(ids):].tolist()
            cached = max((k for k in range(0, len(ids), 16) if tuple(ids[:k]) in self.seen), default=0)
            self.seen.update(tuple(ids[:k]) for k in range(16, len(ids) + 1, 16))
            out.append(Bag(request_id=str(i), prompt_token_ids=ids, finished=True, num_cached_tokens=cached, outputs=[Bag(index=0, token_ids=new, finish_reason="stop" if new[-1] in s.stop else "length")]))
            if log := os.environ.get("STANDIN_LOG"):
                with open(log, "a") as f:
                    f.write(f"{gpu} {os.getpid()} {cached} {' '.join(map(str, ids))}\n")
        if self.calls == 1 and os.environ.get("STANDIN_DROP"):
            out.pop()
        return out[::-1]
