-- Ends a job: from here on no step finds it, and no worker holds a fence. ARGV: retain_s.
-- The caller then unlinks the journals that ROLLOUTS names, and ROLLOUTS last; done again after a crash in between.
if call('EXISTS', JOB) == 0 then return reply('missing') end
call('HSET', JOB, 'deleted', '1')
call('EXPIRE', JOB, math.ceil(tonumber(ARGV[1])))
for i = 2, JOURNALS do
  if KEYS[i] ~= ROLLOUTS then call('UNLINK', KEYS[i]) end
end
return reply('ok')
