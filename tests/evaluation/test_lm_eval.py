"""lm-eval's Hugging Face adapter takes a linearized model like any other."""

import pytest
import torch
from transformers import AutoTokenizer

from lolcats.config import AttentionSection, ModelSection
from lolcats.conversion import convert, load_base_model

huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="lolcats[eval] is not installed")
instance = pytest.importorskip("lm_eval.api.instance")


@torch.no_grad()
def test_log_likelihoods_and_generation(model_dir):
    base, _ = load_base_model(ModelSection(path=str(model_dir), device="cpu", dtype="float32"))
    model = convert(base, AttentionSection(window_size=4)).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.pad_token = tokenizer.eos_token
    adapter = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, device="cpu")

    pairs = [("w1 w2 w3 w4 w5 w6 w7", " w8 w9"), ("w3", " w4 w1 w2")]
    requests = [instance.Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    results = adapter.loglikelihood(requests, disable_tqdm=True)
    for (context, continuation), (value, _) in zip(pairs, results, strict=True):
        tokens = tokenizer(context + continuation, return_tensors="pt").input_ids
        length = len(tokenizer(continuation).input_ids)
        scores = model(tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
        expected = scores.gather(1, tokens[0, 1:, None])[-length:].sum()
        assert value == pytest.approx(float(expected), abs=1e-3)

    arguments = {"until": ["<eos>"], "max_gen_toks": 6, "do_sample": False}
    requests = [instance.Instance("generate_until", {}, (context, arguments), 0) for context, _ in pairs]
    texts = adapter.generate_until(requests, disable_tqdm=True)
    for (context, _), text in zip(pairs, texts, strict=True):
        tokens = tokenizer(context, return_tensors="pt").input_ids
        generated = model.generate(tokens, max_new_tokens=6, do_sample=False, use_cache=False, pad_token_id=1)
        assert text.split() == tokenizer.decode(generated[0, tokens.shape[1] :], skip_special_tokens=True).split()
