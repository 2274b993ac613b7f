"""stories260K, served over HTTP, writes the text that its author published."""

from support.processes.server_process import ROOT, post, serve

GOLDEN = ROOT / "tests" / "golden" / "stories260k_greedy.txt"
# engine/test_engine.py has bits of programs of two sizes, compiled as for a user too.
ONE_PROGRAM = ["--max-num-seqs", "8", "--max-num-batched-tokens", "8", "--no-structured-outputs"]


def test_greedy_text_is_the_published_one_from_nothing_and_from_its_own_start(tmp_path):
    """Compiled as for a user: a prompt of many tokens a step goes on as one token a step does."""
    golden = GOLDEN.read_text().strip()
    assert len(golden) > 500
    model = str(ROOT / "assets" / "stories260k")
    with serve(model, *ONE_PROGRAM, log=tmp_path / "log.txt", shipped=True) as url:

        def completed(**fields) -> dict:
            body = {"model": "stories260k", "temperature": 0, "return_token_ids": True}
            return post(f"{url}/v1/completions", body | fields)["choices"][0]

        whole = completed(prompt="", max_tokens=256)
        assert whole["text"].strip().startswith(golden)
        ids = whole["prompt_token_ids"] + whole["token_ids"]
        rest = completed(prompt=ids[:90], max_tokens=60)
        assert rest["token_ids"] == ids[90:150]
