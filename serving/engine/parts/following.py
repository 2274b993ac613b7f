"""A process that follows rank 0 of an instance over several hosts."""

import dataclasses
import logging

from serving.api.config import EngineConfig
from serving.api.generation_config import NONE
from serving.engine.parts.parts import build_parts
from serving.runtime.gang import Gang

logger = logging.getLogger(__name__)


def follow(config: EngineConfig, gang: Gang) -> None:
    """Build what rank 0 builds, then do what it tells until it ends; see Gang.close.

    Raises ValueError as build_parts does.
    """
    # What rank 0 alone uses, and perhaps it alone has.
    config = dataclasses.replace(config, chat_template=None, generation_config=NONE)
    parts = build_parts(config, {}, gang=gang)
    gang.serve()
    logger.info("Node %d of %d follows rank 0.", gang.rank, gang.size)
    parts.loop.follow(gang.commands())
    parts.compilations.close()
    gang.close()
