-- Gives up control URLs that are still the job's. KEYS: hash url -> job id. ARGV: job id, urls...
local call = redis.call
for i = 2, #ARGV do
  if call('HGET', KEYS[1], ARGV[i]) == ARGV[1] then call('HDEL', KEYS[1], ARGV[i]) end
end
