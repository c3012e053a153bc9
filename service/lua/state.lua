-- What every step shares: the names of a job's keys, its records, and the moves of a group between its states.
-- This text stands before each script that works on a job (all but append.lua).
--
-- KEYS 1..17: the job's fixed keys, in the order of PARTS in service/keys.py. KEYS 18..: journals, by script.
-- Reply: one msgpack map with `status`; "missing": no such job, or it was deleted.
--
-- What always holds between two steps:
-- * A group is in exactly one state, and in at most one index: queued in BACKLOG, ready in READY, leased in one live batch.
-- * CHARGED holds every running, ready and leased group, and the acked ones in SPENT; nothing else.
-- * A rollout in LEASES has a fence, one in PENDING has none; their sum is the rollouts in flight.
-- * `size` of a group counts the members that ended or still may; the others of `requested_size` failed and were left out of it.
-- * A group that ended has no journal, no task, no fence, no place in PENDING or LEASES, and one tombstone in ENDED.
-- Scores: below 2^53, so exact. Minus FRONT puts what comes back before all that never left.

local JOB, COUNTS, GROUPS, ROLLOUTS, FENCES, BACKLOG, PENDING, LEASES, CHARGED, SPENT, READY, BATCHES, BATCH_LEASES, TASKS, ENDED,
  REQUESTS, ORDER = unpack(KEYS, 1, 17)
local JOURNALS = 17 -- KEYS[JOURNALS + i] is the i-th journal passed
local FRONT = 2 ^ 53
local call = redis.call

local function reply(status, fields)
  fields = fields or {}
  fields.status = status
  return cmsgpack.pack(fields)
end

local function seconds()
  local time = call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1e6
end

local function whole(number) return string.format('%.0f', number) end

local function load(key, id)
  local raw = call('HGET', key, id)
  return raw and cmsgpack.unpack(raw)
end

local function save(key, id, record) call('HSET', key, id, cmsgpack.pack(record)) end

local function count(field, by)
  if by ~= 0 then call('HINCRBY', COUNTS, field, by or 1) end
end

local function counted(field) return tonumber(call('HGET', COUNTS, field) or '0') end

-- The job's gate and versions; nil when there is no such job. capacity, budget: nil when the gate is off.
-- min_group_size: nil when no group goes on short.
local function read_job()
  local f = call('HMGET', JOB, 'deleted', 'version', 'lineage', 'capacity', 'budget', 'group_size', 'max_in_flight', 'queue_groups',
    'backlog_limit', 'max_requeues', 'stale_policy', 'zero_variance', 'group_retries', 'min_group_size')
  if f[1] ~= '0' then return nil end
  return {
    version = tonumber(f[2]), lineage = tonumber(f[3]), capacity = tonumber(f[4]), budget = tonumber(f[5]),
    group_size = tonumber(f[6]), max_in_flight = tonumber(f[7]), queue_groups = tonumber(f[8]),
    backlog_limit = tonumber(f[9]), max_requeues = tonumber(f[10]), stale_policy = f[11], zero_variance = f[12],
    group_retries = tonumber(f[13]) or 2 * tonumber(f[6]), min_group_size = tonumber(f[14]),
  }
end

local function member(gid, index) return gid .. '-r' .. whole(index) end

local function unlink_journals(first, last)
  for i = first, last do call('UNLINK', KEYS[JOURNALS + i]) end
end

-- A reason is counted by its part before the first colon.
local function reason_of(reason) return string.sub(string.match(reason, '^[^:]*'), 1, 64) end

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

-- Takes every member out of the queues and from its worker. Members that have not ended become cancelled.
local function stop_members(gid, g, now)
  for i = 0, g.requested_size - 1 do
    local rid = member(gid, i)
    call('ZREM', PENDING, rid)
    call('ZREM', LEASES, rid)
    call('HDEL', FENCES, rid)
    local r = load(ROLLOUTS, rid)
    if r and r.state ~= 'ended' and r.state ~= 'failed' then
      r.state, r.worker, r.ended_at = 'cancelled', nil, now
      save(ROLLOUTS, rid, r)
    end
  end
end

local function leave_state(gid, g)
  if g.state == 'running' or g.state == 'leased' then count(g.state, -1) end
  if g.state == 'queued' then call('ZREM', BACKLOG, gid) end
  if g.state == 'ready' then call('ZREM', READY, gid) end
end

-- The one end of a group. Its place in the gate goes back here, except for an acked one (see ack_group).
local function end_group(gid, g, state, reason, now)
  leave_state(gid, g)
  if g.state == 'running' or g.state == 'queued' then stop_members(gid, g, now) end
  if state ~= 'acked' then
    call('SREM', CHARGED, gid)
    count('tokens_discarded', g.sampled_tokens)
  end
  call('HDEL', TASKS, gid)
  call('ZADD', ENDED, now, 'g:' .. gid)
  count(reason and (state .. ':' .. reason_of(reason)) or state)
  g.state, g.reason, g.ended_at = state, reason, now
  save(GROUPS, gid, g)
end

-- Whether the rewards of the members that ended differ. One that is left to the trainer may.
local function rewards_vary(gid, g)
  local first
  for i = 0, g.requested_size - 1 do
    local r = load(ROLLOUTS, member(gid, i))
    if r.state == 'ended' then
      if r.reward == nil or first and r.reward ~= first then return true end
      first = r.reward
    end
  end
  return false
end

-- Saves a running group one of whose members just ended or was left out. Was it the last one, the group is ready, or dropped.
-- KEYS 18..: the journals of all members.
local function settle_group(gid, g, job, now)
  if g.ended < g.size then
    save(GROUPS, gid, g)
  elseif job.zero_variance == 'drop' and g.requested_size > 1 and not rewards_vary(gid, g) then
    end_group(gid, g, 'dropped', 'zero_variance', now)
    unlink_journals(1, g.requested_size)
  else
    leave_state(gid, g)
    g.state, g.ready_at = 'ready', now
    g.oldest_version, g.oldest_lineage = g.oldest_version or job.version, g.oldest_lineage or job.lineage
    call('ZADD', READY, ready_place(g), gid)
    save(GROUPS, gid, g)
  end
end

-- The same task once more: new attempts of the same rollouts. The caller unlinks the journals.
local function rerun_group(gid, g, now)
  leave_state(gid, g)
  call('SREM', CHARGED, gid)
  count('requeued')
  count('tokens_discarded', g.sampled_tokens)
  g.state, g.requeues, g.ended, g.sampled_tokens, g.queued_at = 'queued', g.requeues + 1, 0, 0, now
  g.oldest_version, g.oldest_lineage, g.batch_id, g.last_batch, g.ready_at = nil, nil, nil, nil, nil
  g.size, g.failed_attempts = g.requested_size, nil
  for i = 0, g.requested_size - 1 do
    local rid = member(gid, i)
    local r = load(ROLLOUTS, rid)
    save(ROLLOUTS, rid, { state = 'waiting', attempt = r.attempt + 1, strikes = 0, sandbox_losses = 0, failures = r.failures,
      created_at = r.created_at })
  end
  call('ZADD', BACKLOG, backlog_place(g), gid)
  save(GROUPS, gid, g)
end

local function stale(g, job)
  if g.oldest_lineage < job.lineage then return true end
  if not job.budget or job.stale_policy == 'pace' then return false end
  return job.version - g.oldest_version > job.budget
end

-- A ready group that may not train.
local function turn_away(gid, g, job, now)
  if job.stale_policy == 'drop' or g.requeues >= job.max_requeues then
    end_group(gid, g, 'dropped', 'stale', now)
  else
    rerun_group(gid, g, now)
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
      save(GROUPS, entry.group_id, g)
    end
  end
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
  for _, entry in ipairs(b.groups) do
    local gid = entry.group_id
    local g = load(GROUPS, gid)
    if g.state ~= 'cancelled' then
      count('tokens_delivered', g.sampled_tokens)
      g.batch_id = bid
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
  call('ZADD', ENDED, now, 'b:' .. bid)
  save(BATCHES, bid, b)
end
