"""Folders are read side by side up to a number of bytes, the first to come first."""

import threading

from support.waiting import wait_until

from serving.lora_server.read_room import ReadRoom, folder_bytes


def test_small_ones_go_together_a_large_one_alone_and_nobody_passes():
    room, begun, lets = ReadRoom(100), [], {}

    def read(name, size):
        with room.hold(size):
            begun.append(name)
            assert lets[name].wait(60)

    threads = []
    for number, (name, size) in enumerate({"a": 60, "b": 40, "huge": 1000, "c": 1}.items()):
        lets[name] = threading.Event()
        threads.append(threading.Thread(target=read, args=(name, size), daemon=True))
        threads[-1].start()
        wait_until(lambda n=number: len(begun) + len(room._waiting) == n + 1)
    wait_until(lambda: begun == ["a", "b"])
    lets["a"].set()
    threads[0].join(60)
    assert begun == ["a", "b"]
    lets["b"].set()
    wait_until(lambda: begun == ["a", "b", "huge"])
    assert room._waiting  # the small one came later
    lets["huge"].set()
    wait_until(lambda: begun[-1] == "c")
    lets["c"].set()
    for thread in threads:
        thread.join(60)
    assert room._bytes == 0


def test_a_read_that_fails_gives_its_bytes_back():
    room = ReadRoom(100)
    for _ in range(2):
        try:
            with room.hold(100):
                raise OSError("no")
        except OSError:
            pass
    assert room._bytes == 0


def test_bytes_of_a_folder(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    (tmp_path / "in").mkdir()
    assert folder_bytes(str(tmp_path)) == 5
    assert folder_bytes(str(tmp_path / "nowhere")) == 0
