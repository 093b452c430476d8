import httpx
import pytest

from evals.server.answers import Kind, kind_of, message_of

NO_REPLICA = {"error": {"message": "no replica of 'm' answered within 605 s", "param": None, "code": "unavailable"}}
OPENAI = {"error": {"message": "not done after the server's limit of 600 s", "param": None, "code": "timeout"}}


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, OPENAI, "refused"),
        (401, OPENAI, "refused"),
        (404, OPENAI, "refused"),
        (500, OPENAI, "refused"),
        (408, OPENAI, "busy"),
        (429, OPENAI, "busy"),
        (429, "slow down", "busy"),
        (504, OPENAI, "busy"),  # the application's own limit of a request's time
        (504, NO_REPLICA, "away"),
        (504, "<html>Gateway Time-out</html>", "away"),
        (502, "<html>Bad Gateway</html>", "away"),
        (503, OPENAI, "away"),
        (503, "not yet", "away"),
        (404, "Path '/v1/chat/completions' not found.", "away"),
        (500, "Internal Server Error", "away"),
        (403, "no", "refused"),
    ],
)
def test_an_answer_says_whether_the_server_is_there(status: int, body: object, kind: Kind) -> None:
    told = {"text": body} if isinstance(body, str) else {"json": body}
    assert kind_of(httpx.Response(status, **told)) == kind


@pytest.mark.parametrize("body", ["", "[]", "null", '"text"', '{"error": "text"}', '{"error": null}', "{"])
def test_a_body_that_is_not_openais_is_shown_as_it_is(body: str) -> None:
    headers = {"Content-Type": "application/json"}
    assert message_of(httpx.Response(500, content=body.encode(), headers=headers)) == body
