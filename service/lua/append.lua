-- Appends a rollout's next steps to its journal, if the caller still holds its lease. The hot path: cost follows what is appended.
-- KEYS: fences hash, journal list, rollouts hash, counts hash, sampled hash, oldest zset.
-- ARGV: rollout id, fence, index of the first entry, sandbox id or '', tokens sampled in the entries, place in oldest or '', entries...
-- Reply: the new length; -1: not the holder; -2: the journal is not as long as the caller believes.
-- What always holds: only the current fence writes; a call that is repeated after a lost reply appends nothing, counts nothing and succeeds.
local call = redis.call
if call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return -1 end
local at, entries = tonumber(ARGV[3]), #ARGV - 6
local length = call('LLEN', KEYS[2])
if length == at + entries and call('LINDEX', KEYS[2], -1) == ARGV[#ARGV] then return length end
if length ~= at then return -2 end
length = call('RPUSH', KEYS[2], unpack(ARGV, 7))
if ARGV[5] ~= '0' then
  call('HINCRBY', KEYS[4], 'tokens_generated', ARGV[5])
  call('HINCRBY', KEYS[5], ARGV[1], ARGV[5])
end
if ARGV[6] ~= '' then call('ZADD', KEYS[6], 'LT', ARGV[6], ARGV[1]) end
if ARGV[4] ~= '' then
  local r = cmsgpack.unpack(call('HGET', KEYS[3], ARGV[1]))
  r.sandbox_id = ARGV[4]
  call('HSET', KEYS[3], ARGV[1], cmsgpack.pack(r))
end
return length
