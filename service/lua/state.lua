-- What every step shares: the names of a job's keys and its records. This text, ledger.lua, rates.lua, solve_rates.lua and moves.lua
-- stand, in this order, before each script that works on a job (all but append.lua).
--
-- KEYS: the job's fixed keys, in the order of PARTS in service/keys.py; then journals, by script.
-- Reply: one msgpack map with `status`; "missing": no such job, or it was deleted.
--
-- What always holds between two steps:
-- * A group is in exactly one state, and in at most one index: queued in BACKLOG, ready in READY, leased in one live batch.
-- * CHARGED holds every running, ready and leased group, and the acked ones in SPENT; nothing else.
-- * A rollout in LEASES has a fence, one in PENDING has none; their sum is the rollouts in flight.
-- * `size` of a group counts the members that ended or still may: the others failed and were left out, or the group had enough without them.
-- * OLDEST holds what is running and has sampled, by rollout, and what is ready and no trainer has had, by group.
-- * A group that ended has no journal, no task, no fence, no place in PENDING or LEASES, and one tombstone in ENDED.
-- * Every sampled token is in one place of the books (see ledger.lua).
-- Scores: below 2^53, so exact. Minus FRONT puts what comes back before all that never left.

local JOB, COUNTS, GROUPS, ROLLOUTS, FENCES, BACKLOG, PENDING, LEASES, CHARGED, SPENT, READY, BATCHES, BATCH_LEASES, TASKS, ENDED,
  REQUESTS, ORDER, SAMPLED, LEDGER, RATES, OLDEST, SOLVE_RATES, SOLVE_ORDER = unpack(KEYS, 1, 23)
local JOURNALS = 23 -- KEYS[JOURNALS + i] is the i-th journal passed
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
    'backlog_limit', 'max_requeues', 'stale_policy', 'zero_variance', 'group_retries', 'min_group_size', 'extra_members')
  if f[1] ~= '0' then return nil end
  return {
    version = tonumber(f[2]), lineage = tonumber(f[3]), capacity = tonumber(f[4]), budget = tonumber(f[5]),
    group_size = tonumber(f[6]), max_in_flight = tonumber(f[7]), queue_groups = tonumber(f[8]),
    backlog_limit = tonumber(f[9]), max_requeues = tonumber(f[10]), stale_policy = f[11], zero_variance = f[12],
    group_retries = tonumber(f[13]) or 2 * tonumber(f[6]), min_group_size = tonumber(f[14]),
    members = tonumber(f[6]) + (tonumber(f[15]) or 0),
  }
end

local function member(gid, index) return gid .. '-r' .. whole(index) end

-- `requested_size` and the job's extra_members.
local function member_count(g) return g.members or g.requested_size end

local function unlink_journals(first, last)
  for i = first, last do call('UNLINK', KEYS[JOURNALS + i]) end
end

-- A reason is counted by its part before the first colon.
local function reason_of(reason) return string.sub(string.match(reason, '^[^:]*'), 1, 64) end
