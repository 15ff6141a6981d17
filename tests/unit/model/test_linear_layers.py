"""Linear layers by oneDNN compute what torch's own do; packed ones become ordinary ones again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import optional
from support.tiny_model import make_model

torch: Any = optional("torch")
transformers: Any = optional("transformers")

PROMPT = list(range(9, 60))


def logits(module: Any, prompt: list[int] = PROMPT) -> Any:
    with torch.inference_mode():
        return module(input_ids=torch.tensor([prompt])).logits[0]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", hidden=64, tied=request.param)


def test_a_packed_model_computes_the_same_and_can_be_unpacked(directory: Path):
    from understudy.model.causal.checkpoint import load_model
    from understudy.model.causal.linear_layers import PackedLinear, pack_linear_layers, unpacked_copy

    plain, packed = load_model(directory), load_model(directory)
    pack_linear_layers(packed)
    assert not [layer for layer in packed.modules() if type(layer) is torch.nn.Linear]
    assert (logits(packed) - logits(plain)).abs().max() < 1e-4 * logits(plain).abs().max()
    again = unpacked_copy(packed)
    assert not [layer for layer in again.modules() if isinstance(layer, PackedLinear)]
    assert torch.equal(logits(again), logits(plain))
    assert again.state_dict().keys() == plain.state_dict().keys()
    embedding, output = again.get_input_embeddings().weight, again.get_output_embeddings().weight
    assert (embedding is output) == plain.config.tie_word_embeddings
    again.get_input_embeddings().weight.data.zero_()
    assert (logits(packed) - logits(plain)).abs().max() < 1e-4 * logits(plain).abs().max()


def test_biases_and_the_weight_in_its_usual_order_are_kept():
    from understudy.model.causal.linear_layers import PackedLinear

    layer = torch.nn.Linear(70, 33)
    packed = PackedLinear(layer)
    inputs = torch.randn(2, 5, 70)
    with torch.inference_mode():
        assert torch.allclose(packed(inputs), layer(inputs), atol=1e-5)
    assert torch.equal(packed.weight, layer.weight)
    unpacked = packed.unpacked()
    unpacked.bias.data.add_(1)
    with torch.inference_mode():
        assert torch.allclose(packed(inputs), layer(inputs), atol=1e-5)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks transformers for it
async def test_a_large_model_is_packed_and_its_weights_and_adapters_are_exchanged(tmp_path: Path):
    peft = optional("peft")
    from understudy.model.causal.checkpoint import read_checkpoint
    from understudy.model.causal.linear_layers import PackedLinear
    from understudy.model.causal.sampling import SamplingSettings
    from understudy.model.causal.serving import SamplingRequest, WeightStore

    first = make_model(tmp_path / "first", hidden=1280, layers=4, context=512)
    second = make_model(tmp_path / "second", hidden=1280, layers=4, context=512, seed=1)
    base = transformers.AutoModelForCausalLM.from_pretrained(second)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(tmp_path / "adapter")

    checkpoint = read_checkpoint(first)
    store: Any = WeightStore(checkpoint, "base", "v0", device="cpu", limits=None)
    try:
        await store.exchange(second, "v1")
        await store.add("tuned", tmp_path / "adapter", in_place=False)
        adapted_logits = logits(adapted.eval())
        with adapted.disable_adapter():
            base_logits = logits(adapted)
        for name, expected in (("base", base_logits), ("tuned", adapted_logits)):
            assert any(isinstance(layer, PackedLinear) for layer in store._modules[name].modules())
            greedy = SamplingRequest(
                prompt=PROMPT, limit=1, model=name, sampling=SamplingSettings(temperature=0.0)
            )
            result = store.engine.submit(greedy).result(60)
            assert result.ids == [int(expected[-1].argmax())]
            assert result.logprobs[0] == pytest.approx(expected[-1].log_softmax(-1).max().item(), abs=1e-3)
    finally:
        store.engine.close()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4, 70), (2, 5, 70), (0, 70), (1, 70)])
def test_a_layer_for_training_has_the_gradients_of_torchs_own(shape: tuple[int, ...], bias: bool):
    from understudy.model.causal.linear_layers import OneDnnLinear

    plain = torch.nn.Linear(70, 33, bias=bias)
    layer = torch.nn.Linear(70, 33, bias=bias)
    layer.load_state_dict(plain.state_dict())
    layer.__class__ = OneDnnLinear
    inputs = torch.randn(shape)
    results: list[list[Any]] = []
    for each in (plain, layer):
        leaf = inputs.clone().requires_grad_()
        outputs = each(leaf)
        (outputs * torch.linspace(-1, 1, outputs.numel()).reshape(outputs.shape)).sum().backward()
        results.append([outputs, leaf.grad, *(parameter.grad for parameter in each.parameters())])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_frozen_weights_get_no_gradient_and_other_types_are_torchs():
    from understudy.model.causal.linear_layers import OneDnnLinear

    layer = torch.nn.Linear(16, 8)
    expected = layer.bfloat16()(torch.ones(2, 16, dtype=torch.bfloat16))
    layer.__class__ = OneDnnLinear
    assert torch.equal(layer(torch.ones(2, 16, dtype=torch.bfloat16)), expected)
    layer.float().requires_grad_(False)
    inputs = torch.ones(2, 16, requires_grad=True)
    layer(inputs).sum().backward()
    assert inputs.grad is not None and layer.weight.grad is None


def test_a_training_step_changes_the_weights_as_with_torchs_layers(directory: Path):
    from understudy.model.causal.checkpoint import load_module
    from understudy.model.causal.linear_layers import OneDnnLinear, use_onednn_for_training

    gradients: list[dict[str, Any]] = []
    for uses_onednn in (False, True):
        module = load_module(directory, torch.float32)
        if uses_onednn:
            use_onednn_for_training(module)
            layers = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
            # Which processors it is for is decided by their maker, so both kinds of machine must pass.
            assert len({isinstance(layer, OneDnnLinear) for layer in layers}) == 1
        ids = torch.tensor([PROMPT, PROMPT[::-1]])
        module(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in module.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, atol=1e-4, rtol=1e-3)
