-- The requests and the report of wrk for scripts/bench.py:
--
--     wrk … --script scripts/bench.lua URL -- FILE
--
-- Each line of the file is a path, a tab, and a JSON body. Requests are chosen at random. There is no function `response`
-- because wrk would then copy each response for it, which costs more than the request.

function init(arguments)
  math.randomseed(os.time())
  requests = {}
  for line in io.lines(arguments[1]) do
    local path, body = line:match("^(.-)\t(.*)$")
    requests[#requests + 1] = wrk.format("POST", path, { ["content-type"] = "application/json" }, body)
  end
end

function request()
  return requests[math.random(#requests)]
end

function done(summary, latency)
  local errors = summary.errors
  local report = '{"seconds": %.6f, "requests": %d, "rejected": %d, "broken": %d, "p50": %.3f, "p99": %.3f}\n'
  io.write(report:format(
    summary.duration / 1e6,
    summary.requests,
    errors.status,
    errors.connect + errors.read + errors.write + errors.timeout,
    latency:percentile(50) / 1e3,
    latency:percentile(99) / 1e3
  ))
end
