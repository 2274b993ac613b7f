from bench import kv_offloading as bench


def test_two_prompts_fill_the_device_and_all_fit_into_the_host():
    pages = max(bench.LENGTHS) // 16
    assert bench.PROMPTS > 2  # so that each prompt pushes another one off the device
    assert bench.PROMPTS * pages * bench.PAGE_BYTES < 0.5 * (1 << 30)
    assert max(bench.LENGTHS) + 16 <= bench.SHAPE.max_positions
