-- An attempt failed. It begins anew, or its group fails and gives everything back.
-- KEYS 18..: the journals of all members. ARGV: group id, rollout id, fence, index, reason, retry ('1'), counts ('1'), max_attempts.
-- Reply: ok {state}: pending or group_failed; lost. What always holds: attempts are bounded, also those that do not count.
local job = read_job()
if not job then return reply('missing') end
local gid, rid, fence, index, reason, now = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5], seconds()
local retry, counts, max_attempts = ARGV[6] == '1', ARGV[7] == '1', tonumber(ARGV[8])
local r, g = load(ROLLOUTS, rid), load(GROUPS, gid)
if not r or not g then return reply('lost') end
if r.settled == fence then return reply('ok', { state = g.state == 'failed' and 'group_failed' or 'pending' }) end
if call('HGET', FENCES, rid) ~= fence then return reply('lost') end

if #r.failures < 16 then r.failures[#r.failures + 1] = string.sub(reason, 1, 500) end
if counts then r.strikes = r.strikes + 1 end
if reason_of(reason) == 'sandbox_destroyed' then r.sandbox_losses = r.sandbox_losses + 1 end
r.settled, r.sandbox_id = fence, nil
if retry and r.strikes < max_attempts and r.attempt < 10 * max_attempts then
  r.attempt, r.expiries = r.attempt + 1, nil
  requeue_rollout(rid, r, now)
  unlink_journals(index + 1, index + 1)
  return reply('ok', { state = 'pending' })
end
r.state, r.worker, r.ended_at, r.outcome = 'failed', nil, now, 'failed'
save(ROLLOUTS, rid, r)
end_group(gid, g, 'failed', reason, now)
unlink_journals(1, g.size)
return reply('ok', { state = 'group_failed' })
