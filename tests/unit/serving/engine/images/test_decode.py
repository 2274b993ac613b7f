"""Files of images: four formats, bounds before decoding, orientation, alpha; nothing else."""

import contextlib
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.cases.tiny_vision import picture, png

from serving.engine.images import decode as module
from serving.engine.images.decode import MAX_PIXELS, ImageError, decode, pixels_of

PICTURE = picture(24, 40, 1)


def saved(image: Image.Image, kind: str, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes that says it is this large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1 << 16), 9)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
def test_lossless_formats_give_the_pixels(kind: str):
    few = (PICTURE // 128) * 128  # colours that a GIF can have
    options = {"lossless": True} if kind == "WEBP" else {}
    np.testing.assert_array_equal(decode(png(few, kind, **options)), few)


def test_jpeg_is_what_pillow_decodes():
    data = png(PICTURE, "JPEG", quality=90)
    want = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(decode(data), want)


@pytest.mark.parametrize("kind", ["TIFF", "BMP", "PPM", "ICO"])
def test_other_formats_are_refused(kind: str):
    with pytest.raises(ImageError, match="not one of PNG, JPEG, WEBP, GIF"):
        decode(png(PICTURE, kind))


@pytest.mark.parametrize("data", [b"", b"hello", b"<svg/>", b"%PDF-1.4", b"\xff\xd8\xff"])
def test_what_is_no_image_is_refused(data: bytes):
    with pytest.raises(ImageError):
        decode(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_no_cut_and_no_flipped_bit_is_more_than_an_error(kind: str):
    data = png(PICTURE, kind)
    rng = np.random.default_rng(0)
    for _ in range(60):
        broken = bytearray(data[: int(rng.integers(1, len(data)))])
        broken[int(rng.integers(len(broken)))] ^= 1 << int(rng.integers(8))
        with contextlib.suppress(ImageError):  # some damage is not to be seen
            assert decode(bytes(broken)).dtype == np.uint8


def test_a_truncated_file_is_an_error():
    data = png(picture(64, 64, 3))
    with pytest.raises(ImageError, match="damaged"):
        decode(data[: len(data) // 2])


@pytest.mark.parametrize("size", [(4097, 4096), (100_000, 100), (30_000, 30_000)])
def test_bombs_are_refused_before_they_are_decoded(size, monkeypatch):
    monkeypatch.setattr(module, "to_rgb", lambda image: pytest.fail("decoded"))
    with pytest.raises(ImageError, match=f"more than|at most {MAX_PIXELS}"):
        decode(bomb(*size))


def test_orientation_is_that_of_exif():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    data = saved(Image.fromarray(PICTURE), "PNG", exif=exif)
    np.testing.assert_array_equal(decode(data), np.rot90(PICTURE, -1))


def test_transparent_pixels_lie_on_white():
    rgba = np.zeros((2, 2, 4), np.uint8)
    rgba[0, 0] = (10, 20, 30, 255)
    rgba[0, 1] = (10, 20, 30, 0)
    got = decode(saved(Image.fromarray(rgba), "PNG"))
    assert got[0, 0].tolist() == [10, 20, 30]
    assert got[0, 1].tolist() == [255, 255, 255]
    grey = Image.new("L", (3, 2), 7)
    assert decode(saved(grey, "PNG")).tolist() == [[[7] * 3] * 3] * 2
    palette = Image.new("P", (2, 2))
    palette.putpalette([1, 2, 3] * 256)
    assert decode(saved(palette, "PNG", transparency=0))[0, 0].tolist() == [255] * 3


def test_grey_of_16_bits_keeps_its_upper_ones():
    grey = np.array([[0, 256, 513], [0x7FFF, 0x8000, 0xFFFF]], np.uint16)
    got = decode(saved(Image.fromarray(grey), "PNG"))
    np.testing.assert_array_equal(got, np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, 2))


def test_every_alpha_gives_what_pillow_composes():
    rgba = np.zeros((256, 256, 4), np.uint8)
    rgba[..., 0], rgba[..., 3] = np.mgrid[:256, :256]
    image = Image.fromarray(rgba)
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    want = np.asarray(Image.alpha_composite(white, image).convert("RGB"))
    np.testing.assert_array_equal(decode(saved(image, "PNG")), want)


def test_an_animation_is_its_first_frame():
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    assert decode(out.getvalue())[0, 0].tolist() == [255, 0, 0]


def test_what_python_callers_give(tmp_path: Path):
    file = tmp_path / "a.png"
    file.write_bytes(png(PICTURE))
    for given in (PICTURE, Image.fromarray(PICTURE), png(PICTURE), file, str(file)):
        np.testing.assert_array_equal(pixels_of(given), PICTURE)
    with pytest.raises(TypeError, match="got int"):
        pixels_of(3)
    with pytest.raises(ImageError, match="uint8"):
        pixels_of(PICTURE.astype("f4"))
    with pytest.raises(ImageError, match="no pixels"):
        pixels_of(PICTURE[:0])
