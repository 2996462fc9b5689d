-- Sends the same request as a line's again and again. It has no number, so the upstream does not count it as repeated.
wrk.method = "POST"
wrk.path = "/v1/chat/completions"
wrk.headers["content-type"] = "application/json"
wrk.body = os.getenv("BENCH_BODY")
