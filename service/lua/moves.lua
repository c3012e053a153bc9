-- The moves of a group between its states.

local function backlog_place(g) return -g.priority * 2 ^ 41 + g.n end

-- Oldest policy first, then oldest group.
local function ready_place(g) return g.oldest_version * 2 ^ 22 + g.n % 2 ^ 22 end

-- Back to pending, before what was never begun; the journal stays and is resumed. `again`: it may have a journal.
local function requeue_rollout(rid, r, now)
  call('ZREM', LEASES, rid)
  call('HDEL', FENCES, rid)
  r.state, r.worker, r.again, r.queued_at = 'pending', nil, true, now
  call('ZADD', PENDING, r.place - FRONT, rid)
  save(ROLLOUTS, rid, r)
end

-- Out of the queues and from its worker, with the tokens of an attempt that has not ended. why: for the books.
local function withdraw(rid, why)
  call('ZREM', PENDING, rid)
  call('ZREM', LEASES, rid)
  call('HDEL', FENCES, rid)
  enter_discarded(take_sampled(rid), why)
end

-- Members that have not ended become cancelled; how many. stop_reason: of each of them, or nil.
local function stop_members(gid, g, now, why, stop_reason)
  local stopped = 0
  for i = 0, member_count(g) - 1 do
    local rid = member(gid, i)
    local r = load(ROLLOUTS, rid)
    if r and r.state ~= 'ended' and r.state ~= 'failed' then
      withdraw(rid, why)
      r.state, r.worker, r.ended_at, r.stop_reason = 'cancelled', nil, now, stop_reason
      save(ROLLOUTS, rid, r)
      stopped = stopped + 1
    end
  end
  return stopped
end

-- Places in OLDEST: by lineage, then version.
local function place_of(lineage, version) return lineage * 2 ^ 32 + version end

-- What lies below may not train any more.
local function oldest_allowed(job)
  local bound = job.stale_policy ~= 'pace' and job.budget
  return place_of(job.lineage, bound and math.max(0, job.version - bound) or 0)
end

local function oldest_place(gid, g)
  if g.state ~= 'running' then return tonumber(call('ZSCORE', OLDEST, gid)) end
  local oldest
  for i = 0, member_count(g) - 1 do
    local place = tonumber(call('ZSCORE', OLDEST, member(gid, i)))
    oldest = place and math.min(place, oldest or place) or oldest
  end
  return oldest
end

local function leave_state(gid, g)
  if g.state == 'running' or g.state == 'leased' then count(g.state, -1) end
  if g.state == 'running' then
    for i = 0, member_count(g) - 1 do call('ZREM', OLDEST, member(gid, i)) end
  end
  if g.state == 'queued' then call('ZREM', BACKLOG, gid) end
  if g.state == 'ready' then
    call('ZREM', READY, gid)
    call('ZREM', OLDEST, gid)
  end
end

-- The one end of a group. Its place in the gate goes back here, except for an acked one (see ack_batch). why: it was discarded, for the books.
local function end_group(gid, g, state, reason, now, why)
  leave_state(gid, g)
  if g.state == 'running' or g.state == 'queued' then stop_members(gid, g, now, why) end
  if state == 'acked' then
    enter_kept(g)
  else
    call('SREM', CHARGED, gid)
    enter_discarded_group(g, why)
    note_refused(g, now, state == 'cancelled')
  end
  call('HDEL', TASKS, gid)
  call('ZADD', ENDED, now, 'g:' .. gid)
  count(reason and (state .. ':' .. reason_of(reason)) or state)
  g.state, g.reason, g.ended_at = state, reason, now
  save(GROUPS, gid, g)
end

-- The group has enough: members that have not ended are stopped, and their journals go.
local function stop_surplus(gid, g, now)
  if g.size == g.ended then return end
  count('surplus_rollouts', stop_members(gid, g, now, 'surplus', 'surplus'))
  for i = 0, member_count(g) - 1 do
    if load(ROLLOUTS, member(gid, i)).state == 'cancelled' then unlink_journals(i + 1, i + 1) end
  end
  g.size = g.ended
end

-- Saves a running group one of whose members just ended or was left out. Are there enough now, or was it the last one, the group is ready,
-- or dropped. Journals: those of all members.
local function settle_group(gid, g, job, now)
  if g.ended < math.min(g.size, g.requested_size) then return save(GROUPS, gid, g) end
  stop_surplus(gid, g, now)
  add_solve_rate(g)
  if job.zero_variance == 'drop' and g.requested_size > 1 and not rewards_vary(g) then
    note_complete(g, now, false)
    end_group(gid, g, 'dropped', 'zero_variance', now, 'zero_variance')
    unlink_journals(1, member_count(g))
  else
    leave_state(gid, g)
    note_complete(g, now, true)
    g.state, g.ready_at, g.ready_version = 'ready', now, job.version
    g.oldest_version, g.oldest_lineage = g.oldest_version or job.version, g.oldest_lineage or job.lineage
    call('ZADD', READY, ready_place(g), gid)
    call('ZADD', OLDEST, place_of(g.oldest_lineage, g.oldest_version), gid)
    save(GROUPS, gid, g)
  end
end

-- The same task once more: new attempts of the same rollouts, whatever they are doing. The caller unlinks the journals.
local function rerun_group(gid, g, now, why)
  leave_state(gid, g)
  call('SREM', CHARGED, gid)
  count('requeued')
  enter_discarded_group(g, why)
  note_refused(g, now)
  g.state, g.requeues, g.ended, g.sampled_tokens, g.lengths, g.queued_at = 'queued', g.requeues + 1, 0, 0, nil, now
  g.oldest_version, g.oldest_lineage, g.batch_id, g.last_batch, g.ready_at = nil, nil, nil, nil, nil
  g.size, g.failed_attempts, g.work, g.rewards, g.ready_version = member_count(g), nil, nil, nil, nil
  for i = 0, member_count(g) - 1 do
    local rid = member(gid, i)
    local r = load(ROLLOUTS, rid)
    withdraw(rid, why)
    save(ROLLOUTS, rid, { state = 'waiting', attempt = r.attempt + 1, strikes = 0, sandbox_losses = 0, failures = r.failures,
      created_at = r.created_at })
  end
  call('ZADD', BACKLOG, backlog_place(g), gid)
  save(GROUPS, gid, g)
end

local function stale(g, job) return place_of(g.oldest_lineage, g.oldest_version) < oldest_allowed(job) end

-- A group that may not train. lineage: of its oldest token.
local function turn_away(gid, g, job, lineage, now)
  local dead = lineage < job.lineage and 'rolled_back'
  if job.stale_policy == 'drop' or g.requeues >= job.max_requeues then
    end_group(gid, g, 'dropped', 'stale', now, dead or 'stale')
  else
    rerun_group(gid, g, now, dead or 'requeued')
  end
end

-- Ends the trainer's hold: its groups go to the front of READY. state: returned (a late ack may still count) or rolled_back (never).
local function return_batch(bid, b, state, now)
  call('ZREM', BATCH_LEASES, bid)
  for _, entry in ipairs(b.groups) do
    local g = load(GROUPS, entry.group_id)
    if g and g.state == 'leased' and g.batch_id == bid then
      leave_state(entry.group_id, g)
      g.state, g.batch_id, g.last_batch = 'ready', nil, bid
      call('ZADD', READY, ready_place(g) - FRONT, entry.group_id)
      if state == 'rolled_back' then call('ZADD', OLDEST, place_of(g.oldest_lineage, g.oldest_version), entry.group_id) end
      save(GROUPS, entry.group_id, g)
    end
  end
  trainer_gone()
  b.state = state
  call('ZADD', ENDED, now, 'b:' .. bid)
  save(BATCHES, bid, b)
end

local function expire_batches(now)
  for _, bid in ipairs(call('ZRANGEBYSCORE', BATCH_LEASES, '-inf', now)) do
    return_batch(bid, load(BATCHES, bid), 'returned', now)
  end
end

-- Whether the batch can be acked: nil, or why not. Groups that the client cancelled meanwhile are no obstacle.
local function ack_refused(bid)
  local b = load(BATCHES, bid)
  if not b then return 'missing' end
  if b.state == 'acked' then return nil end
  if b.state == 'rolled_back' then return 'gone' end
  for _, entry in ipairs(b.groups) do
    local g = load(GROUPS, entry.group_id)
    local ours = g and (g.batch_id == bid and g.state == 'leased' or g.last_batch == bid and g.state == 'ready')
    if not ours and not (g and g.state == 'cancelled') then return 'gone' end
  end
end

-- Acks what ack_refused let pass. The place of a group is free once the version has passed `until`, acked first or bumped first.
local function ack_batch(bid, job, now)
  local b = load(BATCHES, bid)
  if b.state == 'acked' then return end
  local trained = 0
  for _, entry in ipairs(b.groups) do
    local gid = entry.group_id
    local g = load(GROUPS, gid)
    if g.state ~= 'cancelled' then
      g.batch_id, trained = bid, trained + g.ended
      end_group(gid, g, 'acked', nil, now)
      if job.capacity and job.version <= b['until'] then
        call('ZADD', SPENT, b['until'], gid)
      else
        call('SREM', CHARGED, gid)
      end
    end
  end
  b.state = 'acked'
  call('ZREM', BATCH_LEASES, bid)
  trainer_acked(now, trained)
  call('ZADD', ENDED, now, 'b:' .. bid)
  save(BATCHES, bid, b)
end

-- The job's policy version is `version` from now on; places that waited for it are free. A rollback opens a new lineage, and no batch of the
-- old one lives on.
local function publish_version(version, rollback, now)
  call('HSET', JOB, 'version', version)
  if rollback then
    call('HINCRBY', JOB, 'lineage', 1)
    for _, bid in ipairs(call('ZRANGE', BATCH_LEASES, 0, -1)) do return_batch(bid, load(BATCHES, bid), 'rolled_back', now) end
  end
  local freed = call('ZRANGEBYSCORE', SPENT, '-inf', rollback and '+inf' or '(' .. whole(version))
  for _, gid in ipairs(freed) do
    call('SREM', CHARGED, gid)
    call('ZREM', SPENT, gid)
  end
end
