"""The residency over a pool frees what has left, and looks again who may come."""

from support.drivers.pool_driver import Entry, PoolDriver
from support.drivers.registry_changes import follow
from support.drivers.scheduler_driver import limits


def test_what_left_makes_room_for_a_named_adapter():
    driver = PoolDriver(limits(num_pages=40), pages=48)
    entries = [Entry(name, driver.weights[name]) for name in "bdfh"]
    follow(driver.residency, entries)
    for _ in range(8):
        driver.residency.advance(driver.arrays, 2, 0, 0)
    there = driver.allocator.resident()
    assert 0 < len(there) < 4, "not all of them fit"
    follow(driver.residency, [one for one in entries if one.digest != there[0]])
    assert driver.residency.is_busy
    for _ in range(8):
        driver.residency.advance(driver.arrays, 2, 0, 0)
    assert not driver.residency.is_busy
    assert there[0] not in driver.allocator.resident()
    assert driver.allocator.resident()
    driver.residency.check_integrity()
    driver.residency.rest()
    driver.residency.close()
    assert driver.pool.stats().created == 0


def test_a_pinned_adapter_comes_at_once_and_others_when_nobody_waits_for_pages():
    driver = PoolDriver(limits(num_pages=40), pages=48)
    entries = [Entry(name, driver.weights[name]) for name in "bdf"]
    follow(driver.residency, entries)
    for _ in range(20):
        driver.residency.advance(driver.arrays, 2, 0, 0)
        driver.exchange.start_step()
    pinned = Entry("h", driver.weights["h"])
    pinned.pinned = True
    assert "h" not in driver.allocator.resident()
    follow(driver.residency, [*entries, pinned])
    for _ in range(8):
        driver.exchange.start_step()
        driver.residency.advance(driver.arrays, 2, 0, 0)
    assert "h" in driver.allocator.resident()
    assert driver.exchange.is_short
    assert driver.residency.is_busy, "it has yet to look for others"
    for _ in range(64):
        driver.exchange.start_step()
        driver.residency.advance(driver.arrays, 2, 0, 0)
    assert not driver.exchange.is_short
    assert not driver.residency.is_busy
    driver.residency.close()
