"""Images that were prepared before, by the digest of their file: a bounded cache on the host."""

import collections
import threading

from serving.api.images import PreparedImage

_ENTRY_BYTES = 512  # of an image beside its patches


class PreparedImages:
    """The images used last, within `max_bytes` of their patches; any thread may call.

    Keys are whole SHA-256 digests of everything that decides what an image becomes.
    """

    def __init__(self, max_bytes: int):
        """With 0 bytes nothing is kept."""
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._images: collections.OrderedDict[bytes, PreparedImage] = collections.OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of the images that are kept."""
        with self._lock:
            return self._num_bytes

    def find(self, key: bytes) -> PreparedImage | None:
        """Return the image of a key, None where it is not kept."""
        with self._lock:
            image = self._images.get(key)
            if image is not None:
                self._images.move_to_end(key)
            return image

    def keep(self, key: bytes, image: PreparedImage) -> None:
        """Keep an image, and drop those that were used longest ago for it."""
        size = _size(image)
        if size > self._max_bytes:
            return
        with self._lock:
            old = self._images.pop(key, None)
            self._num_bytes += size - (0 if old is None else _size(old))
            self._images[key] = image
            while self._num_bytes > self._max_bytes:
                _, dropped = self._images.popitem(last=False)
                self._num_bytes -= _size(dropped)


def _size(image: PreparedImage) -> int:
    return image.patches.pixels.nbytes + _ENTRY_BYTES
