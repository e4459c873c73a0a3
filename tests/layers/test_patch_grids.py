"""The grid of a converted model's tokens belongs to the call: threads, checkpoints, copies and errors do not mix calls.

Images of 64×96 and 96×64 have as many patches; only the grid tells them apart.
"""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from inline_attention import InLineAttention, convert_attention

timm = pytest.importorskip("timm")

WIDE, TALL, SQUARE = (32, 128), (128, 32), (64, 64)


def converted_vit(depth=2, **options):
    """A small converted ViT for images of any size, whose local terms matter."""
    torch.manual_seed(0)
    arguments = {"img_size": 64, "embed_dim": 24, "num_heads": 2, "num_classes": 3, "dynamic_img_size": True}
    model = timm.create_model("vit_tiny_patch16_224", depth=depth, **(arguments | options)).eval()
    convert_attention(model)
    for module in model.modules():
        if isinstance(module, InLineAttention):
            nn.init.normal_(module.residual[2].weight)
            nn.init.normal_(module.residual[2].bias)
    return model


def images():
    return {size: torch.randn(1, 3, *size) for size in (WIDE, TALL, SQUARE)}


def gradients(model, inputs, backward_order=None):
    """Gradients of the sum over several forward passes, all of which precede all backward passes."""
    model.zero_grad()
    outputs = [model(image).square().sum() for image in inputs]
    for index in backward_order or range(len(outputs)):
        outputs[index].backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_all_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_two_grids_differ():
    model = converted_vit()
    image = torch.randn(1, 3, 64, 64)
    patches = image.unfold(2, 16, 16).unfold(3, 16, 16).reshape(1, 3, 16, 16, 16)
    assert not torch.allclose(*(block_output(model, patches, grid) for grid in ((2, 8), (8, 2))))


def block_output(model, patches, grid):
    image = torch.unflatten(patches, 2, grid).permute(0, 1, 2, 4, 3, 5).flatten(2, 3).flatten(3)
    return model.forward_features(image)[:, 0]


def test_threads_do_not_see_each_others_grids():
    model, pictures = converted_vit(), images()
    with torch.no_grad():
        expected = {size: model(image) for size, image in pictures.items()}
        barrier = threading.Barrier(6)

        def work(size):
            barrier.wait()
            with torch.no_grad():
                return size, [model(pictures[size]) for _ in range(15)]

        with ThreadPoolExecutor(6) as pool:
            for size, outputs in pool.map(work, [WIDE, TALL, SQUARE] * 2):
                assert all(torch.equal(output, expected[size]) for output in outputs), size


def test_threads_train_with_checkpoints():
    model = converted_vit()
    model.set_grad_checkpointing()
    pictures = images()
    parameters = list(model.parameters())

    def grads(size):
        return torch.autograd.grad(model(pictures[size]).square().sum(), parameters)

    expected = {size: grads(size) for size in pictures}
    with ThreadPoolExecutor(4) as pool:
        for size, found in pool.map(lambda size: (size, grads(size)), [WIDE, TALL] * 6):
            assert_all_close(found, expected[size])


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_uses_the_grid_of_its_own_call(every, reentrant, monkeypatch):
    from timm.models import _manipulate

    def checkpoint_seq(functions, x, **_):
        return _manipulate.checkpoint_seq(functions, x, every=every, use_reentrant=reentrant)

    monkeypatch.setattr("timm.models.vision_transformer.checkpoint_seq", checkpoint_seq)
    model, pictures = converted_vit(depth=3), [*images().values()]
    expected = gradients(model, pictures)
    model.set_grad_checkpointing()
    assert_all_close(gradients(model, pictures), expected)
    assert_all_close(gradients(model, pictures, backward_order=[1, 2, 0]), expected)


def test_recomputation_in_another_thread():
    """As on a GPU, whose backward passes run in threads of autograd's."""
    model, pictures = converted_vit(), [*images().values()]
    expected = gradients(model, pictures)
    model.set_grad_checkpointing()
    model.zero_grad()
    losses = [model(image).square().sum() for image in pictures]
    for loss in losses:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert_all_close([parameter.grad for parameter in model.parameters()], expected)


def test_attention_alone_and_all_blocks_may_be_checkpointed():
    model, pictures = converted_vit(), [*images().values()]
    expected = gradients(model, pictures)
    for part in (model.blocks, *(block.attn for block in model.blocks)):
        part.forward = _Checkpointed(part.forward)
    assert_all_close(gradients(model, pictures), expected)


class _Checkpointed:
    def __init__(self, function):
        self.function = function

    def __call__(self, *arguments, **options):
        return checkpoint(self.function, *arguments, use_reentrant=False, **options)


def test_a_checkpoint_of_no_module_is_refused():
    model = converted_vit()
    image = torch.randn(1, 3, *WIDE)
    tokens = model.norm_pre(model._pos_embed(model.patch_embed(image)))
    out = checkpoint(lambda x: model.blocks(x * 1), tokens, use_reentrant=False)
    with pytest.raises(ValueError, match=r"grid of this call is not known.*set_grad_checkpointing"):
        out.sum().backward()


def test_every_entry_point_knows_the_grid():
    model, pictures = converted_vit(), images()
    extractor = timm.create_model(
        "vit_tiny_patch16_224", depth=2, img_size=64, embed_dim=24, num_heads=2, num_classes=0, dynamic_img_size=True,
        features_only=True, out_indices=(0, 1),
    ).eval()  # fmt: skip
    convert_attention(extractor)
    extractor.model.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for image in (*pictures.values(), *pictures.values()):
            expected = fresh(model)(image)
            torch.testing.assert_close(model.forward_head(model.forward_features(image)), expected)
            final, maps = model.forward_intermediates(image)
            torch.testing.assert_close(model.forward_head(final), expected)
            torch.testing.assert_close(extractor(image)[-1], maps[-1])
            torch.testing.assert_close(model(image), expected)


def fresh(model):
    """A copy that has never been called."""
    return pickle.loads(pickle.dumps(model))


def test_copies_and_pickles_are_models_of_their_own():
    model, pictures = converted_vit(), images()
    twins = [copy.deepcopy(model), fresh(model), copy.deepcopy(fresh(model))]
    numbers = {twin.blocks[0].attn.patch_grid.number for twin in (model, *twins)}
    assert len(numbers) == 4
    for twin in twins:
        assert twin.blocks[0].attn.patch_grid.patch_embed is twin.patch_embed
        for image in pictures.values():
            torch.testing.assert_close(twin(image), model(image))


@pytest.mark.parametrize("size", [WIDE, TALL])
def test_blocks_called_directly_see_nothing_of_earlier_calls(size):
    model, tokens = converted_vit(), torch.randn(1, 17, 24)
    expected = [fresh(model).blocks(tokens), fresh(model).blocks[0].attn(tokens)]
    image = torch.randn(1, 3, *size)
    for call in (model, model.forward_features, model.forward_intermediates):
        call(image)
        assert_all_close([model.blocks(tokens), model.blocks[0].attn(tokens)], expected)


@pytest.mark.parametrize("entry_point", ["__call__", "forward_features", "forward_intermediates"])
@pytest.mark.parametrize("part", ["patch_embed", "norm_pre", "blocks.0.mlp", "blocks.1.attn.proj", "blocks.1", "norm"])
def test_an_error_half_way_leaves_nothing_behind(part, entry_point):
    model, tokens, pictures = converted_vit(), torch.randn(1, 17, 24), images()
    expected = {size: fresh(model)(image) for size, image in pictures.items()}
    direct = fresh(model).blocks(tokens)

    def fail(*_):
        raise RuntimeError("half-way")

    hook = model.get_submodule(part).register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="half-way"):
        getattr(model, entry_point)(pictures[WIDE])
    hook.remove()
    if part != "norm_pre":  # there the next call of the blocks could be the rest of this one
        torch.testing.assert_close(model.blocks(tokens), direct)
    for size in (TALL, SQUARE, WIDE):
        torch.testing.assert_close(model(pictures[size]), expected[size])


def test_a_converted_model_inside_another():
    """The inner model runs in the middle of the outer one, on an image of another shape."""
    inner, outer, pictures = converted_vit(), converted_vit(), images()

    class WithInner(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block, self.inner = block, inner

        def forward(self, x, **options):
            return self.block(x, **options) + self.inner(pictures[TALL]).sum()

    expected = None
    for wrap in (False, True):
        model = copy.deepcopy(outer)
        if wrap:
            model.blocks[0] = WithInner(model.blocks[0])
            found = model(pictures[WIDE])
        else:
            shift = inner(pictures[TALL]).sum()
            model.blocks[0].register_forward_hook(lambda *arguments, shift=shift: arguments[-1] + shift)
            expected = model(pictures[WIDE])
    torch.testing.assert_close(found, expected)


def test_a_model_called_inside_itself():
    model, pictures = converted_vit(depth=3), images()
    expected = model(pictures[WIDE])
    calls = []

    def call_again(*_):
        if not calls:
            calls.append(1)
            model(pictures[TALL])

    model.blocks[0].register_forward_hook(call_again)
    torch.testing.assert_close(model(pictures[WIDE]), expected)


def test_operations_between_blocks_do_not_lose_the_grid():
    model, pictures = converted_vit(), images()
    expected = {size: model(image) for size, image in pictures.items()}
    model.blocks[0].register_forward_hook(lambda *arguments: arguments[-1] * 1)
    for size, image in pictures.items():
        torch.testing.assert_close(model(image), expected[size])


@pytest.mark.parametrize("img_size", [(32, 128), (64, 64)])
def test_operations_between_blocks_that_are_called_one_by_one_do_not_lose_the_grid(img_size):
    """As in prompt tuning. The set image size has as many tokens as the image, so that a guess would be silent."""
    model, tokens = converted_vit(depth=3, img_size=img_size), torch.randn(1, 17, 24)
    direct = fresh(model).blocks(tokens)
    for size in (WIDE, TALL, SQUARE):
        image = torch.randn(1, 3, *size)
        x = model.norm_pre(model._pos_embed(model.patch_embed(image)))
        for block in model.blocks:
            x = block(x) * 1
        torch.testing.assert_close(model.norm(x), fresh(model).forward_features(image))
        torch.testing.assert_close(model.blocks(tokens), direct)


def test_a_wrapped_model_is_converted_with_its_own_grid_and_prefix():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = timm.create_model(
                "vit_tiny_patch16_224", depth=1, img_size=64, embed_dim=24, num_heads=2, dynamic_img_size=True
            )

        def forward(self, x):
            return self.encoder(x)

    model = Wrapper()
    assert convert_attention(model) == ["encoder.blocks.0.attn"]
    attention = model.encoder.blocks[0].attn
    assert attention.num_prefix_tokens == 1
    assert attention.patch_grid.patch_embed is model.encoder.patch_embed
    model(torch.randn(1, 3, *WIDE)).sum().backward()


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_models_in_threads(fullgraph):
    model, pictures = converted_vit(depth=1), images()
    if not fullgraph:
        model.norm_pre.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    compiled = torch.compile(model, fullgraph=fullgraph, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        expected = {size: model(image) for size, image in pictures.items()}
        for size, image in pictures.items():
            torch.testing.assert_close(compiled(image), expected[size])

        def work(size):
            with torch.no_grad():
                return size, [compiled(pictures[size]) for _ in range(5)]

        with ThreadPoolExecutor(3) as pool:
            for size, outputs in pool.map(work, [WIDE, TALL, SQUARE]):
                for output in outputs:
                    torch.testing.assert_close(output, expected[size])


def test_compiled_training_with_checkpoints():
    torch.compiler.reset()  # tests in this process share timm's forward, and its cache has a limit
    model, pictures = converted_vit(depth=2), [*images().values()][:2]
    expected = gradients(model, pictures)
    model.set_grad_checkpointing()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    for loss in [compiled(image).square().sum() for image in pictures]:
        loss.backward()
    assert_all_close([parameter.grad for parameter in model.parameters()], expected)


def test_a_compiled_block_that_is_recomputed_is_right_or_refused():
    model, image = converted_vit(depth=1), torch.randn(1, 3, *WIDE)
    expected = gradients(model, [image])
    model.blocks[0].compile(backend="aot_eager")
    assert_all_close(gradients(model, [image]), expected)
    model.set_grad_checkpointing()
    with pytest.raises(Exception, match="grid of this call is not known"):
        gradients(model, [image])


def test_an_exported_model_has_the_grid_in_its_graph():
    model, image = converted_vit(depth=1), torch.randn(1, 3, *WIDE)
    with torch.no_grad():
        exported = torch.export.export(model, (image,)).module()
        torch.testing.assert_close(exported(image), model(image))
    assert torch.equal(model(image), fresh(model)(image))


def test_a_model_of_one_image_size_needs_no_hooks():
    model = converted_vit(img_size=WIDE, dynamic_img_size=False)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.blocks[0].attn.patch_grid.current(torch.randn(1, 17, 24)) == (2, 8)
    model.set_input_size(TALL)
    assert model.blocks[0].attn.patch_grid.current(torch.randn(1, 17, 24)) == (8, 2)
    with pytest.raises(ValueError, match="leave 9, not the 8×2 of the image"):
        model.blocks[0].attn(torch.randn(1, 10, 24))
