-- What a job's rates were over the last while. ARGV: window_s.
-- Reply: no map but a list: the time; that of the first dispatch or nil; the trainer or nil; then each slot that there is, packed as it is kept.
if not read_job() then return {} end
local now = seconds()
local last, fields = math.floor(now / SLOT_S), {}
for i = 0, math.min(SLOTS, math.ceil(tonumber(ARGV[1]) / SLOT_S)) - 1 do fields[#fields + 1] = whole((last - i) % SLOTS) end
local found = { string.format('%.6f', now), call('HGET', JOB, 'began'), call('HGET', RATES, 'trainer') }
for i, raw in ipairs(call('HMGET', RATES, unpack(fields))) do
  if raw and cmsgpack.unpack(raw).at == last - i + 1 then found[#found + 1] = raw end
end
return found
