-- Gives a worker up to n rollouts: expired leases come back, the gate admits groups while rollouts are wanted, the first n are leased.
-- ARGV: worker, n, lease_s.
-- Reply: ok {leases, tenant, version, lineage, new_epoch}.
-- What always holds: a fence is higher than every earlier one of this rollout, also after a Redis that lost its last writes: its run id is
-- then another, and the epoch rises.
local job = read_job()
if not job then return reply('missing') end
local worker, wanted, lease_s, now = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), seconds()

for _, rid in ipairs(call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, 1000)) do
  local r = load(ROLLOUTS, rid)
  r.expiries = (r.expiries or 0) + 1
  requeue_rollout(rid, r, now)
end

-- The cap on rollouts in flight: that of the spec, or what was decided below it (steer.lua) where the job is adaptive.
local function in_flight_cap()
  local f = call('HMGET', JOB, 'start_in_flight', 'in_flight_cap')
  local start = tonumber(f[1])
  return start and math.min(job.max_in_flight, tonumber(f[2]) or start) or job.max_in_flight
end

-- nil: another group may go; else what holds it back.
local cap
local function held_back()
  cap = cap or in_flight_cap()
  if call('ZCARD', PENDING) + call('ZCARD', LEASES) + job.members > cap then return 'capped' end
  local out = job.capacity and call('SCARD', CHARGED) or counted('running') + call('ZCARD', READY)
  if out >= (job.capacity or job.queue_groups) then return 'gated' end
end

local function dispatch(gid)
  local g, turn = load(GROUPS, gid), call('HINCRBY', JOB, 'dispatches', 1)
  leave_state(gid, g)
  call('SADD', CHARGED, gid)
  count('running')
  g.state = 'running'
  save(GROUPS, gid, g)
  for i = 0, member_count(g) - 1 do
    local rid = member(gid, i)
    local r = load(ROLLOUTS, rid) or { attempt = 1, strikes = 0, sandbox_losses = 0, failures = {}, created_at = g.created_at }
    r.state, r.place, r.queued_at, r.dispatched_at = 'pending', turn * 1024 + i, g.queued_at, now
    save(ROLLOUTS, rid, r)
    call('ZADD', PENDING, r.place, rid)
  end
end

local dispatched, held = 0, nil
while call('ZCARD', PENDING) < wanted do
  local first = call('ZRANGE', BACKLOG, 0, 0)[1]
  held = first and held_back()
  if not first or held then break end
  dispatch(first)
  dispatched = dispatched + 1
end
if dispatched > 0 then call('HSETNX', JOB, 'began', now) end
if held or dispatched > 0 then note(now, { asked = 1, [held or 'let_go'] = 1 }) end

-- The epoch, raised when this server is not the one that gave the last fence.
local function epoch()
  local run_id = string.match(call('INFO', 'server'), 'run_id:(%x+)')
  if call('HGET', JOB, 'run_id') == run_id then return tonumber(call('HGET', JOB, 'epoch')), false end
  call('HSET', JOB, 'run_id', run_id)
  return call('HINCRBY', JOB, 'epoch', 1), true
end

local taken = wanted > 0 and call('ZPOPMIN', PENDING, wanted) or {}
if #taken == 0 then return reply('ok', { leases = {} }) end
local current, new_epoch = epoch()
local leases = {}
for i = 1, #taken, 2 do
  local rid = taken[i]
  local r, fence = load(ROLLOUTS, rid), whole(current * 2 ^ 32 + call('HINCRBY', JOB, 'fences', 1))
  call('HSET', FENCES, rid, fence)
  call('ZADD', LEASES, now + lease_s, rid)
  leases[#leases + 1] = {
    rollout_id = rid, fence = fence, attempt = r.attempt, queued_s = now - r.queued_at, sandbox_losses = r.sandbox_losses,
    again = r.again or false, expiries = r.expiries or 0,
  }
  r.state, r.worker = 'leased', worker
  save(ROLLOUTS, rid, r)
end
return reply('ok', {
  leases = leases, tenant = call('HGET', JOB, 'tenant'), version = job.version, lineage = job.lineage, members = job.members,
  new_epoch = new_epoch,
})
