"""Files of images to RGB pixels, within bounds that hold before anything is decoded.

Only the four formats of the web are read. What a file says of itself beside its pixels (EXIF but
its orientation, text, identifiers) is never used.
"""

import io
import warnings
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageOps

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 16_777_216  # what models use at most
MAX_SIDE = 65_536
_DAMAGED = "The image is damaged or ends too early."


class ImageError(ValueError):
    """An image that cannot be read; the message is fixed text and numbers."""


def decode(data: bytes) -> np.ndarray:
    """Return the pixels of a PNG, JPEG, WebP or GIF (its first frame): uint8 [height, width, 3].

    Turned as EXIF says; transparent pixels lie on white. ImageError for anything else, for more
    than MAX_PIXELS, which is known before decoding, and for a damaged file.
    """
    if not data:
        raise ImageError("The image is empty.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sizes are checked here, metadata is not used
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                check_size(*image.size)
                image.load()
                return to_rgb(image)
    except ImageError:
        raise
    except Image.UnidentifiedImageError:
        formats = ", ".join(FORMATS)
        raise ImageError(f"The image is not one of {formats}.") from None
    except Image.DecompressionBombError:
        raise ImageError(f"The image has more than {MAX_PIXELS} pixels.") from None
    except Exception:  # whatever a decoder finds wrong
        raise ImageError(_DAMAGED) from None


def check_size(width: int, height: int) -> None:
    """Raise ImageError for an image that is empty or too large."""
    if width < 1 or height < 1:
        raise ImageError("The image has no pixels.")
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise ImageError(f"The image has {width} x {height} pixels; at most {MAX_PIXELS} are read.")


def to_rgb(image: Image.Image) -> np.ndarray:
    """Return an opened image's pixels, uint8 [height, width, 3], which may not be written to."""
    image.load()  # EXIF may stand at a file's end
    # Pillow copies an image that is not to be turned, and one that is to become what it is.
    is_turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
    turned = ImageOps.exif_transpose(image) if is_turned else image
    if turned.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in turned.info:
        above = turned.convert("RGBA")
        turned = Image.new("RGB", above.size, (255, 255, 255))
        # It has the bits of Image.alpha_composite, which holds up all other threads.
        turned.paste(above, mask=above.getchannel("A"))
    elif turned.mode.startswith("I;16"):
        turned = turned.point(lambda value: value / 256).convert("L")
    return np.asarray(turned if turned.mode == "RGB" else turned.convert("RGB"))


def pixels_of(given: Any) -> np.ndarray:
    """Return the pixels of what a Python caller gives as an image.

    That is a PIL image, the bytes of a file, a path, or uint8 [height, width, 3]. TypeError for
    anything else, ImageError as `decode`.
    """
    if isinstance(given, Image.Image):
        check_size(*given.size)
        return to_rgb(given)
    if (data := bytes_of(given)) is not None:
        return decode(data)
    if isinstance(given, np.ndarray):
        if given.dtype != np.uint8 or given.ndim != 3 or given.shape[2] != 3:
            raise ImageError(
                f"An array of an image is uint8 [height, width, 3], got {given.dtype} "
                f"{list(given.shape)}."
            )
        check_size(given.shape[1], given.shape[0])
        return given
    raise TypeError(
        "An image is a PIL image, the bytes or the path of a file, or an array; got "
        f"{type(given).__name__}."
    )


def bytes_of(given: Any) -> bytes | None:
    """Return the bytes of a file that a Python caller gives as such or by its path, else None."""
    if isinstance(given, bytes | bytearray):
        return bytes(given)
    if hasattr(given, "__fspath__") or isinstance(given, str):
        with open(given, "rb") as file:
            return file.read()
    return None
