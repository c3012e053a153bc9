-- Leases n ready groups to the trainer, or none; first turns away those that may not train.
-- Journals: those of the groups named in ARGV 6.., all members of each.
-- ARGV: n, allow_fewer ('1'), lease_s, trains_version or '', request key, then groups whose journals were passed.
-- Reply: ok {batch_id, batch}; none {drained: nothing is left to come but what is ready}; above {limit}; behind {version}; acked: the key's batch is done;
--   journals {groups}: call again with the journals of these, which are to be turned away.
-- What always holds: a group is in one live batch; none is delivered stale; the same key gets the same live batch.
local job = read_job()
if not job then return reply('missing') end
local n, fewer, lease_s, trains, key = tonumber(ARGV[1]), ARGV[2] == '1', tonumber(ARGV[3]), tonumber(ARGV[4]), 'l:' .. ARGV[5]
local now = seconds()
if n > (job.capacity or job.queue_groups) then return reply('above', { limit = job.capacity or job.queue_groups }) end
if trains and trains < job.version then return reply('behind', { version = job.version }) end
expire_batches(now)

local earlier = call('HGET', REQUESTS, key)
local known = earlier and load(BATCHES, earlier)
if known and known.state == 'live' then return reply('ok', { batch_id = earlier, batch = known }) end
if known and known.state == 'acked' then return reply('acked') end

local passed = {}
for i = 6, #ARGV do passed[ARGV[i]] = i - 6 end

local fresh, unfit, unknown = {}, {}, {}

local function sort_out(gid)
  local g = load(GROUPS, gid)
  if not stale(g, job) then
    fresh[#fresh + 1] = { id = gid, g = g }
  elseif passed[gid] then
    unfit[#unfit + 1] = { id = gid, g = g }
  else
    unknown[#unknown + 1] = gid
  end
end

local from, page = 0, nil
repeat
  page = call('ZRANGE', READY, from, from + n - #fresh - 1)
  for _, gid in ipairs(page) do sort_out(gid) end
  from = from + #page
until #page == 0 or #fresh == n
if #unknown > 0 then return reply('journals', { groups = unknown, members = job.members }) end

for _, item in ipairs(unfit) do
  turn_away(item.id, item.g, job, item.g.oldest_lineage, now)
  local first = passed[item.id] * job.members
  unlink_journals(first + 1, first + member_count(item.g))
end
if #fresh == 0 or #fresh < n and not fewer then
  local left = call('ZCARD', BACKLOG) + counted('running') + counted('leased')
  trainer_asked(now, left > 0)
  return reply('none', { drained = left == 0 })
end

local bid = call('HGET', JOB, 'job_id') .. '-b' .. whole(call('HINCRBY', JOB, 'batches', 1))
local b = { state = 'live', version = job.version, lineage = job.lineage, leased_at = now, lease_until = now + lease_s, request_key = key }
b.groups = {}
b['until'] = trains or job.version
local ages = { leased = #fresh, staleness = 0, pre_queue = 0 }
for i, item in ipairs(fresh) do
  local g = item.g
  leave_state(item.id, g)
  count('leased')
  g.state, g.batch_id, g.last_batch, g.leased_at = 'leased', bid, nil, now
  save(GROUPS, item.id, g)
  local age = math.max(0, job.version - g.oldest_version)
  b.groups[i] = { group_id = item.id, staleness = age }
  ages[staleness_field(age)] = (ages[staleness_field(age)] or 0) + 1
  ages.staleness = ages.staleness + age
  ages.pre_queue = ages.pre_queue + math.min(age, math.max(0, (g.ready_version or g.oldest_version) - g.oldest_version))
end
save(BATCHES, bid, b)
call('ZADD', BATCH_LEASES, b.lease_until, bid)
call('HSET', REQUESTS, key, bid)
note(now, ages)
trainer_asked(now, false)
return reply('ok', { batch_id = bid, batch = b })
