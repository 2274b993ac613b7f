"""Messages of turns: a letter tells which one it is, and one read holds the longest."""

import dataclasses

from serving.functions.turns import messages as messages
from serving.functions.turns.log import Stamps
from serving.functions.turns.table import Ask

OF_FUNCTIONS = messages.ASK, messages.BACK, messages.ENDED
OF_KEEPER = messages.GRANT, messages.FOLLOW, messages.ALONE, messages.RECALL


def test_letters_differ():
    letters = OF_FUNCTIONS + OF_KEEPER
    assert len(set(letters)) == len(letters)
    assert all(len(letter) == 1 for letter in letters)


def test_words_come_back_as_they_were():
    for letter in OF_KEEPER:
        assert messages.WORD.unpack(messages.word(letter, 1234.5)) == (letter, 1234.5)


def test_a_message_has_the_fields_of_what_it_tells():
    ask, stamps = Ask(1.0, 0.5, 0.01, 0.9), Stamps(1.0, 2.0, 3.0, 4.0)
    sent = messages.ASK_FIELDS.pack(messages.ASK, *dataclasses.astuple(ask))
    assert Ask(*messages.ASK_FIELDS.unpack(sent)[1:]) == ask
    sent = messages.BACK_FIELDS.pack(messages.BACK, True, *stamps)
    assert Stamps(*messages.BACK_FIELDS.unpack(sent)[2:]) == stamps


def test_a_message_that_is_too_long_is_told_from_all_others():
    sizes = {messages.ASK_FIELDS.size, messages.BACK_FIELDS.size, messages.WORD.size, 1}
    assert len(sizes) == 4, "the keeper tells messages by letter and size"
    assert max(sizes) < messages.LONGEST
