"""Items of a response: order of events, what closes an item, and what is left of it."""

from serving.http.answers.response_items import ResponseItems


def call(index, arguments, name=None):
    head = {"id": f"call_{index}"} if name else {}
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"tool_calls": [{"index": index, **head, "function": function}]}


def kinds(events):
    return [event["type"].removeprefix("response.") for event in events]


def test_a_text_begins_grows_and_ends():
    items = ResponseItems()
    events = items.take({"content": "a"}, [1]) + items.take({"content": "b"}, [2])
    events += items.end(is_complete=True)
    assert kinds(events) == [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert events[0]["item"]["content"] == []  # as it was then
    assert events[1]["part"]["text"] == ""
    assert events[4]["text"] == "ab"
    (item,) = items.output
    assert (item["type"], item["status"]) == ("message", "completed")
    assert item["content"] == [
        {"type": "output_text", "text": "ab", "annotations": [], "logprobs": [1, 2]}
    ]
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}


def test_thoughts_text_and_calls_are_items_of_their_own():
    items = ResponseItems()
    events = items.take({"reasoning_content": "t", "content": "a"}, [])
    events += items.take(call(0, "{", "play"), []) + items.take(call(0, "}"), [])
    events += items.take(call(1, "{}", "stop"), []) + items.take({"content": "b"}, [])
    events += items.end(is_complete=False)
    assert [item["type"] for item in items.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "message",
    ]
    assert [item["status"] for item in items.output] == ["completed"] * 4 + ["incomplete"]
    calls = items.output[2:4]
    assert [(c["call_id"], c["name"], c["arguments"]) for c in calls] == [
        ("call_0", "play", "{}"),
        ("call_1", "stop", "{}"),
    ]
    assert items.output[0]["content"] == [{"type": "reasoning_text", "text": "t"}]
    added = [event["output_index"] for event in events if event["type"].endswith("item.added")]
    done = [event["output_index"] for event in events if event["type"].endswith("item.done")]
    assert added == done == [0, 1, 2, 3, 4]
    assert kinds(events).count("function_call_arguments.delta") == 3
    assert kinds(events).count("function_call_arguments.done") == 2


def test_no_text_at_all_is_an_empty_message():
    items = ResponseItems()
    assert kinds(items.end(is_complete=True))[:2] == ["output_item.added", "content_part.added"]
    assert items.output[0]["content"][0]["text"] == ""
    assert items.close() == []
