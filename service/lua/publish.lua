-- A job got its name: it stays. Reply: ok; missing: it was deleted meanwhile, and its tombstone still goes by itself.
if not read_job() then return reply('missing') end
call('PERSIST', JOB)
return reply('ok')
