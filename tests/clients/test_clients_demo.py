"""The openai client against `s2moe serve` on the demo model: real answers by the whole path."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from e2e_rig import ServeProcess
from install import is_installed, python_of

PROGRAM = """
import json, sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
question = {"role": "user", "content": "What is the capital of France?"}
ask = {"model": "demo", "messages": [question], "temperature": 0}
whole = client.chat.completions.create(**ask)
stream = client.chat.completions.create(**ask, stream=True)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
person = {
    "type": "json_schema",
    "json_schema": {
        "name": "person",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
    },
}
form = client.chat.completions.create(**ask, response_format=person, max_tokens=200)
print(json.dumps({"whole": whole.choices[0].message.content, "streamed": streamed,
                  "form": form.choices[0].message.content, "tokens": whole.usage.completion_tokens}))
"""


def test_openai_client_gets_real_answers(tiny_model_path: Path, tmp_path: Path) -> None:
    assert is_installed("openai"), "run `make test-clients`"
    server = ServeProcess(tmp_path / "log", "--model", str(tiny_model_path), "--ctx-size", "2048")
    try:
        server.wait_ready()
        command = [str(python_of("openai")), "-c", PROGRAM, f"{server.url}/v1"]
        output = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    finally:
        server.close()
    seen = json.loads(output)
    assert "Paris" in seen["whole"]
    assert seen["streamed"] == seen["whole"]
    assert seen["tokens"] > 0
    assert set(json.loads(seen["form"])) == {"name", "age"}
