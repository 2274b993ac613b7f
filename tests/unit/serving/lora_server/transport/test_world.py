"""Ranks are the first PEs of a world, instances follow."""

from serving.lora_server.transport.world import World


def test_every_process_has_a_pe_of_its_own_and_the_id_is_not_shown():
    world = World(b"an id that lets processes in", ranks=3, instances=2, one_host=False)
    pes = [*range(world.ranks), *map(world.pe_of_instance, range(world.instances))]
    assert pes == list(range(world.size))
    assert "lets" not in repr(world)
