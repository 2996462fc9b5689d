"""What a survey of a work file finds (G5)."""

import json
from pathlib import Path

from batchline.domain.limits import InputLimits, ShardLimits
from batchline.pipeline.survey import survey_file
from batchline.pipeline.validate import validate_file
from batchline.ports import ModelSurvey

CHAT = "/v1/chat/completions"


def test_lines_are_summed_by_model_over_all_shards(tmp_path: Path) -> None:
    bodies = [{"model": f"m{n % 3}", "messages": [n % 10], "max_tokens": 5} for n in range(300)]
    bodies.append({"model": "m0", "messages": ["no limit"]})
    source, work = tmp_path / "source", tmp_path / "work"
    source.write_text(
        "".join(
            json.dumps({"custom_id": str(n), "method": "POST", "url": CHAT, "body": body}) + "\n"
            for n, body in enumerate(bodies)
        )
    )
    verdict = validate_file(
        source=source, work=work, endpoint=CHAT, limits=InputLimits(), shards=ShardLimits(max_lines=16)
    )
    survey = survey_file(work, verdict.shards)
    assert [(model.model, model.lines, model.output_tokens_at_most) for model in survey.models] == [
        ("m0", 101, None),
        ("m1", 100, 500),
        ("m2", 100, 500),
    ]
    assert survey.duplicates == 300 - 30
    assert all(isinstance(model, ModelSurvey) and model.input_tokens > 100 for model in survey.models)
