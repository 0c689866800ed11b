"""Tiny text-to-image pipelines with random weights, saved to disk as the real ones are: SDXL, SD3, FLUX.1-schnell, and a Stable Diffusion 1."""
from __future__ import annotations

from pathlib import Path

SIZE = 64  # pixels a side that the tiny pipelines draw; their autoencoders shrink eightfold as the real ones do


def clip_tokenizer():
    "Byte-level, 514 tokens, 77 at most in a prompt."
    from transformers import CLIPTokenizer
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    signs = [chr(b) if b in plain else chr(next(rest)) for b in range(256)]
    tokens = [*signs, *(s + '</w>' for s in signs), '<|startoftext|>', '<|endoftext|>']
    return CLIPTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[], model_max_length=77)


def t5_tokenizer():
    "Pieces with their log probabilities: some words, every letter and digit, and T5's own special tokens in their places."
    from transformers import T5TokenizerFast
    words = ['a', 'the', 'in', 'person', 'to', 'century', 'cook', 'ing', 'and']
    pieces = [('<pad>', 0.0), ('</s>', 0.0), ('<unk>', 0.0), *((f'▁{w}', -3.0) for w in words), *((c, -5.0) for c in '▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,')]
    return T5TokenizerFast(vocab=pieces + [(f'<extra_id_{i}>', 0.0) for i in range(99, -1, -1)])


def _clip(tok, projected: bool, width: int = 32):
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection
    config = CLIPTextConfig(vocab_size=len(tok), hidden_size=width, intermediate_size=37, num_hidden_layers=3, num_attention_heads=4, projection_dim=width, initializer_factor=3.0,
                            bos_token_id=tok.bos_token_id, eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id)
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)


def _t5(tok, width: int):
    from transformers import T5Config, T5EncoderModel
    return T5EncoderModel(T5Config(vocab_size=len(tok), d_model=width, d_kv=8, d_ff=37, num_layers=2, num_heads=4, dropout_rate=0.1, initializer_factor=1.0))


def _vae(channels: int, **kw):
    from diffusers import AutoencoderKL
    return AutoencoderKL(in_channels=3, out_channels=3, down_block_types=['DownEncoderBlock2D'] * 4, up_block_types=['UpDecoderBlock2D'] * 4, block_out_channels=[8] * 4,
                         latent_channels=channels, norm_num_groups=4, layers_per_block=1, sample_size=SIZE, **kw)


def _unet(**kw):
    from diffusers import UNet2DConditionModel
    return UNet2DConditionModel(sample_size=SIZE // 8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8,
                                down_block_types=('DownBlock2D', 'CrossAttnDownBlock2D'), up_block_types=('CrossAttnUpBlock2D', 'UpBlock2D'), attention_head_dim=4, **kw)


def _sdxl():
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline
    tok = clip_tokenizer()
    unet = _unet(cross_attention_dim=64, use_linear_projection=True, addition_embed_type='text_time', addition_time_embed_dim=8, transformer_layers_per_block=(1, 2), projection_class_embeddings_input_dim=6 * 8 + 32)
    scheduler = EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule='scaled_linear', steps_offset=1, timestep_spacing='leading')
    return StableDiffusionXLPipeline(vae=_vae(4, scaling_factor=0.13025, force_upcast=True), text_encoder=_clip(tok, False), text_encoder_2=_clip(tok, True), tokenizer=tok, tokenizer_2=clip_tokenizer(),
                                     unet=unet, scheduler=scheduler, add_watermarker=False)


def _sd3():
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    tok, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = SD3Transformer2DModel(sample_size=SIZE // 8, patch_size=2, in_channels=16, out_channels=16, num_layers=2, attention_head_dim=8, num_attention_heads=4, joint_attention_dim=64,
                                        caption_projection_dim=32, pooled_projection_dim=64, pos_embed_max_size=32)
    return StableDiffusion3Pipeline(transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=_vae(16, scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False),
                                    text_encoder=_clip(tok, True), tokenizer=tok, text_encoder_2=_clip(tok, True), tokenizer_2=clip_tokenizer(), text_encoder_3=_t5(t5, 64), tokenizer_3=t5)


def _flux(guidance_embeds: bool = False):
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    tok, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = FluxTransformer2DModel(patch_size=1, in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
                                         axes_dims_rope=[4, 4, 8], guidance_embeds=guidance_embeds)
    return FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0), vae=_vae(16, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False),
                        text_encoder=_clip(tok, False), tokenizer=tok, text_encoder_2=_t5(t5, 32), tokenizer_2=t5, transformer=transformer)


def _sd1():
    from diffusers import PNDMScheduler, StableDiffusionPipeline
    tok = clip_tokenizer()
    return StableDiffusionPipeline(vae=_vae(4), text_encoder=_clip(tok, False), tokenizer=tok, unet=_unet(cross_attention_dim=32), scheduler=PNDMScheduler(skip_prk_steps=True), safety_checker=None,
                                   feature_extractor=None, requires_safety_checker=False)


MAKERS = {'SDXL': _sdxl, 'SD3': _sd3, 'FLUX.1-schnell': _flux, 'FLUX.1-dev': lambda: _flux(True), 'SD1': _sd1}


def build(name: str, folder, seed: int = 0) -> Path:
    "Save the tiny pipeline of `name` to `folder`; its classes, files and tokenizers are the real ones."
    import torch
    folder = Path(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = MAKERS[name]()
        pipe.save_pretrained(folder, safe_serialization=True)
    return folder
