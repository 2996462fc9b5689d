"""The shapes of charts."""

from batchline.console.charts import latency_chart, load_chart
from batchline.pipeline.load_history import BatchSample, UpstreamSample


def _sample(at: int, *, attempts: int = 0, seconds: float = 0.0) -> UpstreamSample:
    return UpstreamSample(at=at, in_flight=1, limit=2, attempts=attempts, seconds=seconds)


def test_the_load_is_an_area_below_the_limit() -> None:
    samples = [BatchSample(at=at, in_flight=in_flight, limit=8) for at, in_flight in ((0, 9), (100, 2), (150, 8))]
    chart = load_chart(samples, since=100, until=200)
    assert chart is not None
    assert chart.peak == 8
    assert chart.in_flight == "0.0,60.5 300.0,2.0 300.0,80.0 0.0,80.0"
    assert chart.limit == "0.0,2.0 300.0,2.0"


def test_without_samples_there_is_no_chart() -> None:
    assert load_chart([], since=0, until=1) is None
    assert load_chart([BatchSample(at=1, in_flight=0, limit=0)] * 2, since=0, until=2) is None
    assert latency_chart([_sample(3600)], until=3600) is None


def test_latency_is_a_mean_by_minute_over_the_last_hour() -> None:
    samples = [
        _sample(0, attempts=1, seconds=99),
        _sample(7200 - 3540, attempts=1, seconds=1),
        _sample(7190, attempts=3, seconds=1.5),
        _sample(7200, attempts=1, seconds=4),
        _sample(7205, attempts=3, seconds=4),
    ]
    chart = latency_chart(samples, until=7210)
    assert chart is not None
    assert chart.peak == 2
    assert [(bar.x, bar.height) for bar in chart.bars] == [(0, 40), (580, 20), (590, 80)]
    assert chart.bars[-1].label == "02:00: 2.0 s, 4 requests"
