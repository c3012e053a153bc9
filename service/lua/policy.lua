-- The trainer published a version; batches may be acked in the same step.
-- Journals: those of the acked batches. ARGV: version, rollback ('1'), batch ids...
-- Reply: ok; lower {version}; gone or missing_batch {batch_id}. What always holds: all of it, or nothing.
local job = read_job()
if not job then return reply('missing') end
local version, rollback, now = tonumber(ARGV[1]), ARGV[2] == '1', seconds()
if version < job.version and not rollback then return reply('lower', { version = job.version }) end
for i = 3, #ARGV do
  local refused = ack_refused(ARGV[i])
  if refused then return reply(refused == 'missing' and 'missing_batch' or 'gone', { batch_id = ARGV[i] }) end
end
for i = 3, #ARGV do ack_batch(ARGV[i], job, now) end
unlink_journals(1, #KEYS - JOURNALS)

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
return reply('ok')
