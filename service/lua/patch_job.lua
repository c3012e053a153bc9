-- Changes a job's spec if it is still the one that was read. ARGV: spec as read, new spec, then field, value... of the gate.
-- Reply: ok; changed: read again. A gate that is turned off frees the places that waited for a version.
if not read_job() then return reply('missing') end
if call('HGET', JOB, 'spec') ~= ARGV[1] then return reply('changed') end
call('HSET', JOB, 'spec', ARGV[2], unpack(ARGV, 3))
if not read_job().capacity then
  for _, gid in ipairs(call('ZRANGE', SPENT, 0, -1)) do call('SREM', CHARGED, gid) end
  call('UNLINK', SPENT)
end
return reply('ok')
