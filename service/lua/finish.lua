-- A rollout ended with a trajectory. The last member makes the group ready, or drops it.
-- Journals: those of all members. ARGV: group id, rollout id, fence, msgpack map of the end (class Ended).
-- Reply: ok {state} of the group; lost. What always holds: one end per attempt; the same fence finishing twice gets the same answer.
local job = read_job()
if not job then return reply('missing') end
local gid, rid, fence, now = ARGV[1], ARGV[2], ARGV[3], seconds()
local r, g = load(ROLLOUTS, rid), load(GROUPS, gid)
if not r or not g then return reply('lost') end
if r.state == 'ended' and r.settled == fence then return reply('ok', { state = g.state }) end
if call('HGET', FENCES, rid) ~= fence then return reply('lost') end

call('ZREM', LEASES, rid)
call('HDEL', FENCES, rid)
for field, value in pairs(cmsgpack.unpack(ARGV[4])) do r[field] = value end
local spent = r.seconds or {}
r.state, r.worker, r.settled, r.ended_at, r.seconds = 'ended', nil, fence, now, nil
save(ROLLOUTS, rid, r)
enter_member(rid, r, g)
note_member(r, g, spent, now)
add_reward(r, g)
if r.oldest_version then
  g.oldest_version = math.min(g.oldest_version or r.oldest_version, r.oldest_version)
  g.oldest_lineage = math.min(g.oldest_lineage or r.oldest_lineage, r.oldest_lineage)
  call('ZADD', OLDEST, place_of(r.oldest_lineage, r.oldest_version), rid)
end
settle_group(gid, g, job, now)
return reply('ok', { state = g.state })
