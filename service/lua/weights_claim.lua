-- Claims control URLs for a job: all of them, or none. KEYS: hash url -> job id. ARGV: job id, urls...
-- Reply: nil, or the first URL that another job has and that job's id.
local call = redis.call
for i = 2, #ARGV do
  local owner = call('HGET', KEYS[1], ARGV[i])
  if owner and owner ~= ARGV[1] then return { ARGV[i], owner } end
end
for i = 2, #ARGV do call('HSET', KEYS[1], ARGV[i], ARGV[1]) end
