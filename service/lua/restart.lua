-- An attempt failed. Its rollout begins anew; or the group goes on without that rollout; or the group fails and gives everything back.
-- Journals: those of all members. ARGV: group id, rollout id, fence, index, reason, retry ('1'), counts ('1'), max_attempts.
-- Reply: ok {state}: pending, left_out or group_failed; lost.
-- What always holds: attempts are bounded, per rollout (also those that do not count) and per group. A fault of the task (no retry)
-- fails its group at once; else a group goes on without a member as long as min_group_size of them are left, or, with no such, group_size.
local job = read_job()
if not job then return reply('missing') end
local gid, rid, fence, index, reason, now = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5], seconds()
local retry, counts, max_attempts = ARGV[6] == '1', ARGV[7] == '1', tonumber(ARGV[8])
local r, g = load(ROLLOUTS, rid), load(GROUPS, gid)
if not r or not g then return reply('lost') end
if r.settled == fence then
  return reply('ok', { state = g.state == 'failed' and 'group_failed' or r.state == 'failed' and 'left_out' or 'pending' })
end
if call('HGET', FENCES, rid) ~= fence then return reply('lost') end

-- The first reasons and the last one.
r.failures[math.min(#r.failures + 1, 16)] = string.sub(reason, 1, 500)
if counts then r.strikes = r.strikes + 1 end
local destroyed = reason_of(reason) == 'sandbox_destroyed' -- by the model: nothing that the group's retries are for
if destroyed then r.sandbox_losses = r.sandbox_losses + 1 end
if counts and not destroyed then g.failed_attempts = (g.failed_attempts or 0) + 1 end
r.settled, r.sandbox_id = fence, nil
local kind = reason_of(reason)
enter_discarded(take_sampled(rid), kind == 'stale_environment' and kind or 'failed:' .. kind) -- nothing failed there
call('ZREM', OLDEST, rid)

-- Why there is no other attempt; nil: there is one.
local function used_up()
  if r.strikes >= max_attempts or r.attempt >= 10 * max_attempts then
    return 'member ' .. whole(index) .. ' has used up its attempts'
  end
  if counts and not destroyed and g.failed_attempts > job.group_retries then
    return 'the group has used up its ' .. whole(job.group_retries) .. ' retries'
  end
end

local over = retry and used_up()
if retry and not over then
  r.attempt, r.expiries = r.attempt + 1, nil
  requeue_rollout(rid, r, now)
  unlink_journals(index + 1, index + 1)
  save(GROUPS, gid, g)
  return reply('ok', { state = 'pending' })
end

call('ZREM', LEASES, rid)
call('HDEL', FENCES, rid)
r.state, r.worker, r.ended_at, r.outcome = 'failed', nil, now, 'failed'
save(ROLLOUTS, rid, r)
local least = job.min_group_size or g.requested_size
if retry and g.size > least then
  g.size = g.size - 1
  count('left_out_rollouts')
  unlink_journals(index + 1, index + 1)
  settle_group(gid, g, job, now)
  return reply('ok', { state = 'left_out' })
end

-- The reason's class, before its first colon, stays what is counted.
if over then
  reason = reason .. (string.find(reason, ':', 1, true) and '; ' or ': ') .. over
    .. ' (' .. whole(g.failed_attempts or 0) .. ' failed attempts in the group)'
  if least < member_count(g) then
    reason = reason .. ', and fewer than ' .. (job.min_group_size and 'min_group_size ' or 'group_size ') .. whole(least) .. ' would be left'
  end
end
end_group(gid, g, 'failed', reason, now, 'sibling_failed')
unlink_journals(1, member_count(g))
return reply('ok', { state = 'group_failed' })
