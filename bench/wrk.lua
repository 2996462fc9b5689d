-- The same request as a line's, over and over. It has no number, so the upstream does not take it for a line sent twice.
wrk.method = "POST"
wrk.path = "/v1/chat/completions"
wrk.headers["content-type"] = "application/json"
wrk.body = os.getenv("BENCH_BODY")
