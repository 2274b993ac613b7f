"""The end of an image in its prompt."""

from serving.api.images import PreparedImage, PromptImage


def test_an_image_ends_behind_its_last_token():
    image = PreparedImage(patches=None, grid=(4, 6), num_tokens=6, digest=b"d")
    placed = PromptImage(image, start=3, key=b"k")
    assert placed.end == 9
    assert placed != PromptImage(image, start=3, key=b"k")  # each stands for itself
