-- Takes or renews the right to drive a job's update. KEYS: the right. ARGV: driver, ttl_ms ('0': give it up). Reply: 1 if it is ours.
local call = redis.call
local holder = call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then
  call('DEL', KEYS[1])
else
  call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
end
return 1
